"""The users' HTTP API to what a model cited: `【3†L9-L11】` to address, title and lines.

Above: `app`. Below: sandboxes' public API, `browsing`, `identity`, `requests`, `auth`, `errors`.
Reads what a session committed; makes no session, and none of another principal can be named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sandboxes.spec import KeyKind, SessionKey
from toolhost.auth import Authenticator
from toolhost.browsing.citations import annotate, resolve
from toolhost.browsing.errors import BrowserError
from toolhost.browsing.session import RESOURCE
from toolhost.browsing.state import BrowserState
from toolhost.config import Settings
from toolhost.errors import Refused
from toolhost.identity import keyed
from toolhost.requests import json_value

MAX_CITATIONS = 100
MAX_BODY = 1 << 20
_WANTED = 'send a JSON object with the text: {"text": "… 【3†L9-L11】 …"}'


class StoredResources(Protocol):
    """What is needed of `sandboxes.manager.SessionManager`."""

    async def resource_parts(self, key: SessionKey, name: str) -> Mapping[str, bytes]: ...


Answer = Callable[[BrowserState], dict[str, Any]]


def routes(sessions: StoredResources, auth: Authenticator, settings: Settings) -> list[Route]:
    """GET resolves citations, POST a text with citations in it; a session is named by kind and id, or by the id that
    came as `x-session-id`."""

    async def answer(request: Request) -> Response:
        address = request.client.host if request.client else ""
        principal = auth.authenticate(request.scope["headers"], address)
        kind = request.path_params.get("kind") or KeyKind.REQUEST.value
        key = keyed(kind, request.path_params["id"], principal=principal.name, settings=settings)
        work = await _asked(request)
        stored = await sessions.resource_parts(key, RESOURCE)
        if not stored:
            raise Refused(404, "this session has opened no pages")
        return JSONResponse(await asyncio.to_thread(_answer, stored, work))

    paths = ("/v1/sessions/{id}/citations", "/v1/sessions/{kind}/{id}/citations")
    handler: Callable[[Request], Awaitable[Response]] = answer
    return [Route(path, handler, methods=["GET", "POST"]) for path in paths]


async def _asked(request: Request) -> Answer:
    """What is asked of the stack. Raises Refused."""
    if request.method == "POST":
        text = await _text(request)
        return lambda state: asdict(annotate(state, text))
    wanted = request.query_params.getlist("citation")
    if not 0 < len(wanted) <= MAX_CITATIONS:
        raise Refused(400, f"give 1 to {MAX_CITATIONS} citations: ?citation=【3†L9-L11】 (again for more)")
    return lambda state: {"citations": [_resolved(state, citation) for citation in wanted]}


async def _text(request: Request) -> str:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise Refused(413, f"at most {MAX_BODY} bytes are taken here")
    try:
        found = json_value(body)
    except Refused as refused:
        raise Refused(400, f"{refused}; {_WANTED}") from None
    if not isinstance(found, dict) or found.keys() != {"text"} or not isinstance(found["text"], str):
        raise Refused(400, _WANTED)
    return found["text"]


def _answer(stored: Mapping[str, bytes], work: Answer) -> dict[str, Any]:
    try:
        state = BrowserState.from_parts(stored)
    except ValueError:
        raise Refused(404, "this session's pages cannot be read any more") from None
    return work(state)


def _resolved(state: BrowserState, citation: str) -> dict[str, Any]:
    try:
        return {"citation": citation, **asdict(resolve(state, citation))}
    except BrowserError as error:
        return {"citation": citation, "error": str(error)}
