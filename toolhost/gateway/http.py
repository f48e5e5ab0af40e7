"""What the gateway's routes share: who asks, bodies within bounds, answers, streams that end with their client.

Above: routes. Below: `auth`, `errors`, `service`.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from toolhost.auth import Authenticator
from toolhost.errors import Refused
from toolhost.gateway.errors import ApiError
from toolhost.gateway.feed import frame
from toolhost.gateway.stores.base import StoreError

T = TypeVar("T")

PING_S = 10.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Json(JSONResponse):
    """A JSON answer in ASCII: models send halves of surrogate pairs, which only their escapes can carry."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def principal_of(request: Request, auth: Authenticator) -> str:
    """Who asks. Raises Refused."""
    client = request.scope.get("client")
    return auth.authenticate(request.scope["headers"], str(client[0]) if client else "").name


async def body_of(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError 413 beyond the limit (bytes)."""
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
        parts.append(part)
    return b"".join(parts)


def sse(entries: AsyncIterator[str], on_leave: Callable[[], None] = lambda: None) -> Response:
    """Entries as a stream of events, one write each, then `[DONE]`. `on_leave`: the client went before the end."""
    return _EventStream(entries, on_leave)


class _EventStream(StreamingResponse):
    """Written without a task for each event, which would cost more than the event."""

    def __init__(self, entries: AsyncIterator[str], on_leave: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers=headers)
        self._entries = entries
        self._on_leave = on_leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        writing = asyncio.ensure_future(self._write(send))
        others = [asyncio.ensure_future(_left(receive)), asyncio.ensure_future(_ping(send))]
        try:
            await asyncio.wait({writing, *others}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            if not writing.done() or writing.cancelled() or writing.exception() is not None:
                self._on_leave()
            for task in (writing, *others):
                task.cancel()
            await asyncio.wait({writing, *others})

    async def _write(self, send: Send) -> None:
        async for line in self._entries:
            await send({"type": "http.response.body", "body": frame(line), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _ping(send: Send) -> None:
    """A client's read timeout must not fire during a long call."""
    while True:
        await asyncio.sleep(PING_S)
        await send({"type": "http.response.body", "body": PING, "more_body": True})


async def unless_left(request: Request, work: Awaitable[T], on_leave: Callable[[], None]) -> T:
    """Wait for work; `on_leave` is called if the client goes first, and the work is waited for all the same."""
    leaving = asyncio.ensure_future(_left(request.receive))
    waiting = asyncio.ensure_future(work)
    try:
        await asyncio.wait({leaving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            on_leave()
        return await waiting
    finally:
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Endpoint = Callable[[Request], Awaitable[Response]]


def answering(endpoint: Endpoint) -> Endpoint:
    """An endpoint whose errors are OpenAI error objects, and whose answers carry a request id."""

    async def answer(request: Request) -> Response:
        given = request.headers.get("x-request-id", "")
        ident = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        try:
            response = await endpoint(request)
        except ApiError as error:
            response = Json(error.as_body(), error.status)
        except Refused as refused:
            body = ApiError(refused.status, refused.message, code="invalid_api_key" if refused.status == 401 else None)
            response = Json(body.as_body(), refused.status)
            for name, value in refused.headers:
                response.headers.append(name, value)
        except StoreError as error:
            response = Json(ApiError(503, str(error), code="store_unavailable").as_body(), 503)
        except ClientDisconnect:
            response = Response(status_code=400)
        response.headers["x-request-id"] = ident
        return response

    return answer
