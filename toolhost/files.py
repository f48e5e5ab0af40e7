"""The users' HTTP API: sessions of one's own, their files, and results to collect. Keys are always the principal's own.

Above: `app`. Below: sandboxes' public API, `identity`, `auth`, `errors`.

A session is named in the path by its kind and id; without a kind the id is one that came as `x-session-id`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sandboxes.session import SessionInfo
from sandboxes.spec import KeyKind, Outcome, SessionKey
from sandboxes.stores.base import AttemptRecord, SessionFilter
from toolhost import session_view, transfers
from toolhost.auth import Authenticator, Principal
from toolhost.config import Settings
from toolhost.errors import Refused
from toolhost.identity import keyed
from toolhost.namespaces.render import receipt_meta, render
from toolhost.requests import address_of, know_file_names, number, values
from toolhost.transfers import Files

MAX_LISTED = 1000


class OwnSessions(Protocol):
    """What is needed of `sandboxes.manager.SessionManager`."""

    async def collect(self, key: SessionKey, attempt_id: str) -> Outcome: ...

    async def sessions(self, which: SessionFilter | None = None) -> Sequence[SessionInfo]: ...

    async def session(self, key: SessionKey) -> SessionInfo: ...

    async def attempts(self, key: SessionKey, limit: int = 100) -> Sequence[AttemptRecord]: ...

    async def close_session(self, key: SessionKey) -> bool: ...

    async def mint(self, principal: str, ttl_s: float | None = None) -> SessionKey: ...

    def files(self, key: SessionKey) -> Files: ...


Handler = Callable[[Request, SessionKey], Awaitable[Response]]


def routes(sessions: OwnSessions, auth: Authenticator, settings: Settings) -> list[Route]:
    """The routes under /v1/sessions."""
    know_file_names()
    return UserApi(sessions, auth, settings).routes()


class UserApi:
    def __init__(self, sessions: OwnSessions, auth: Authenticator, settings: Settings) -> None:
        self._sessions = sessions
        self._auth = auth
        self._settings = settings
        self._limit = settings.server.max_file_bytes

    def routes(self) -> list[Route]:
        found = [
            Route("/v1/sessions", self._list, methods=["GET"]),
            Route("/v1/sessions", self._mint, methods=["POST"]),
        ]
        for base, kind in (*((f"/v1/sessions/{kind}/{{id}}", kind) for kind in KeyKind), ("/v1/sessions/{id}", None)):
            for path, method, handler in (
                ("", "GET", self._show),
                ("", "DELETE", self._close),
                ("/attempts", "GET", self._attempts),
                ("/attempts/{attempt}", "GET", self._collect),
                ("/files", "GET", self._listing),
                ("/files/{path:file}", "GET", self._download),
                ("/files/{path:file}", "PUT", self._upload),
                ("/files/{path:file}", "DELETE", self._remove),
                ("/archive", "GET", self._archive),
            ):
                found.append(Route(base + path, self._own(kind, handler), methods=[method]))
        found.append(Route("/v1/sessions/{kind}/{id}/{rest:path}", self._unknown_kind))
        return found

    def _principal(self, request: Request) -> Principal:
        return self._auth.authenticate(request.scope["headers"], address_of(request))

    def _own(self, kind: KeyKind | None, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            principal = self._principal(request)
            ident = request.path_params["id"]
            key = keyed(kind or KeyKind.REQUEST, ident, principal=principal.name, settings=self._settings)
            return await handler(request, key)

        return handle

    async def _unknown_kind(self, request: Request) -> Response:
        principal = self._principal(request)
        keyed(request.path_params["kind"], "x", principal=principal.name, settings=self._settings)
        raise Refused(404, "nothing is served at this path")

    async def _list(self, request: Request) -> Response:
        principal = self._principal(request)
        if self._auth.open and not self._settings.server.loopback:
            raise Refused(403, "without tokens everybody is the same here: sessions are not listed. See --tokens-file")
        infos = await self._sessions.sessions(SessionFilter(principal=principal.name, limit=MAX_LISTED))
        return JSONResponse({"sessions": await session_view.view(self._sessions, infos)})

    async def _mint(self, request: Request) -> Response:
        principal = self._principal(request)
        ttl_s = number(await values(request, {"ttl_s"}), "ttl_s")
        key = await self._sessions.mint(principal.name, ttl_s)
        return JSONResponse(minted(key), 201)

    async def _show(self, _request: Request, key: SessionKey) -> Response:
        (found,) = await session_view.view(self._sessions, [await self._sessions.session(key)])
        return JSONResponse(found)

    async def _close(self, _request: Request, key: SessionKey) -> Response:
        return JSONResponse({"closed": await self._sessions.close_session(key)})

    async def _attempts(self, _request: Request, key: SessionKey) -> Response:
        found = await self._sessions.attempts(key)
        return JSONResponse({"attempts": [session_view.attempt(known) for known in found]})

    async def _collect(self, request: Request, key: SessionKey) -> Response:
        outcome = await self._sessions.collect(key, request.path_params["attempt"])
        return JSONResponse({"receipt": receipt_meta(outcome.receipt), "text": render(outcome)})

    async def _listing(self, request: Request, key: SessionKey) -> Response:
        return await transfers.listing(self._sessions.files(key), request)

    async def _download(self, request: Request, key: SessionKey) -> Response:
        return await transfers.download(self._sessions.files(key), request.path_params["path"], self._limit)

    async def _archive(self, request: Request, key: SessionKey) -> Response:
        return await transfers.archive(self._sessions.files(key), request, self._limit)

    async def _upload(self, request: Request, key: SessionKey) -> Response:
        return await transfers.upload(self._sessions.files(key), request.path_params["path"], request, self._limit)

    async def _remove(self, request: Request, key: SessionKey) -> Response:
        return await transfers.remove(self._sessions.files(key), request.path_params["path"])


def minted(key: SessionKey) -> dict[str, Any]:
    """The one place that shows a retained key: to who asked for it."""
    return {"session": key.digest(), "principal": key.principal, "key": key.id, "header": "x-toolhost-session"}
