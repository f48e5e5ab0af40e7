"""The operators' HTTP API: everybody's sessions. Needs the scope `admin`; without tokens it is served on loopback only.

Above: `app`. Below: sandboxes' public API, `auth`, `errors`.

A session is named by the digest of its key, or the beginning of one, so that no path and no log holds a secret.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sandboxes.lifecycle import Phase
from sandboxes.session import SessionInfo
from sandboxes.spec import KeyKind, SessionKey
from sandboxes.stores.base import SessionFilter
from toolhost import session_view, transfers
from toolhost.auth import NAME, Authenticator, Principal, Scope
from toolhost.config import Settings
from toolhost.errors import Refused
from toolhost.files import OwnSessions, minted
from toolhost.identity import label
from toolhost.requests import address_of, flag, know_file_names, number, query, text, values

BASE = "/v1/admin/sessions"
DIGEST = re.compile(r"[0-9a-f]{6,32}")
MAX_LISTED = 10_000
CLOSING_AT_ONCE = 16


class AllSessions(OwnSessions, Protocol):
    """What is needed of `sandboxes.manager.SessionManager`."""

    async def find(self, digest: str) -> Sequence[SessionKey]: ...

    async def interrupt(self, key: SessionKey) -> bool: ...

    async def restart(self, key: SessionKey) -> int: ...

    @property
    def counts(self) -> dict[str, int]: ...


Handler = Callable[[Request, SessionKey], Awaitable[Response]]


def routes(sessions: AllSessions, auth: Authenticator, settings: Settings) -> list[Route]:
    """The routes under /v1/admin."""
    know_file_names()
    return AdminApi(sessions, auth, settings).routes()


class AdminApi:
    def __init__(self, sessions: AllSessions, auth: Authenticator, settings: Settings) -> None:
        self._sessions = sessions
        self._auth = auth
        self._loopback = settings.server.loopback
        self._limit = settings.server.max_file_bytes

    def routes(self) -> list[Route]:
        found = [
            Route(BASE, self._list, methods=["GET"]),
            Route(BASE, self._mint, methods=["POST"]),
            Route(f"{BASE}/close", self._close_many, methods=["POST"]),
        ]
        for path, method, handler in (
            ("", "GET", self._show),
            ("", "DELETE", self._close),
            ("/interrupt", "POST", self._interrupt),
            ("/restart", "POST", self._restart),
            ("/attempts", "GET", self._attempts),
            ("/files", "GET", self._listing),
            ("/files/{path:file}", "GET", self._download),
            ("/files/{path:file}", "PUT", self._upload),
            ("/files/{path:file}", "DELETE", self._remove),
            ("/archive", "GET", self._archive),
        ):
            found.append(Route(f"{BASE}/{{session}}{path}", self._named(handler), methods=[method]))
        return found

    # --- who and what ------------------------------------------------------------------------------------------------

    def _operator(self, request: Request) -> Principal:
        """Raises Refused: 401, 403, 429."""
        if self._auth.open and not self._loopback:
            raise Refused(
                403, "the operators' API needs tokens on a host that others can reach: start it with --tokens-file"
            )
        return self._auth.authenticate(request.scope["headers"], address_of(request), Scope.ADMIN)

    def _named(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            self._operator(request)
            return await handler(request, await self._find(request.path_params["session"]))

        return handle

    async def _find(self, digest: str) -> SessionKey:
        if not DIGEST.fullmatch(digest):
            raise Refused(400, "a session is named by 6 to 32 hexadecimal digits of its digest, as the list shows it")
        found = await self._sessions.find(digest)
        if not found:
            raise Refused(404, f"no session is known whose digest begins with {digest}")
        if len(found) > 1:
            raise Refused(409, f"{len(found)} sessions' digests begin with {digest}: give more digits")
        return found[0]

    # --- all of them -------------------------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        self._operator(request)
        fields = query(request, {"principal", "phase", "kind", "id", "closed", "idle_s", "limit"})
        infos = await self._matching(fields)
        return JSONResponse(
            {"sessions": await session_view.view(self._sessions, infos), "counts": self._sessions.counts}
        )

    async def _matching(self, fields: Mapping[str, Any]) -> list[SessionInfo]:
        phases, limit = _phases(text(fields, "phase")), _limit(fields.get("limit"))
        kind, ident, idle_s = text(fields, "kind"), text(fields, "id"), number(fields, "idle_s")
        if kind is not None and kind not in tuple(KeyKind):
            raise Refused(400, f"kind is one of {', '.join(KeyKind)}")
        idle_since = None if idle_s is None else time.time() - idle_s
        some = kind is None and ident is None and idle_s is None
        which = SessionFilter(
            principal=text(fields, "principal"),
            phases=phases,
            include_closed=flag(fields, "closed") or bool(phases and Phase.CLOSED in phases),
            limit=limit if some else MAX_LISTED,
        )
        found = [
            info
            for info in await self._sessions.sessions(which)
            if (kind is None or info.record.key.kind == kind)
            and (ident is None or info.record.key.id == ident)
            and (idle_since is None or _idle(info, idle_since))
        ]
        return found[:limit]

    async def _mint(self, request: Request) -> Response:
        operator = self._operator(request)
        fields = await values(request, {"principal", "ttl_s"})
        principal = text(fields, "principal") or operator.name
        if not NAME.fullmatch(principal):
            raise Refused(400, "principal must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
        key = await self._sessions.mint(principal, number(fields, "ttl_s"))
        return JSONResponse(minted(key), 201)

    async def _close_many(self, request: Request) -> Response:
        self._operator(request)
        fields = await values(request, {"principal", "phase", "kind", "id", "idle_s", "all", "dry_run"})
        if not flag(fields, "all") and not any(fields.get(name) for name in ("principal", "idle_s", "phase", "id")):
            raise Refused(400, 'say which: principal, idle_s, phase or id; or {"all": true} for every session')
        infos = [info for info in await self._matching(fields) if info.phase is not Phase.CLOSED]
        names = [{"session": info.record.key.digest(), "name": label(info.record.key)} for info in infos]
        if flag(fields, "dry_run"):
            return JSONResponse({"would_close": names})
        gate = asyncio.Semaphore(CLOSING_AT_ONCE)

        async def close(info: SessionInfo) -> bool:
            async with gate:
                return await self._sessions.close_session(info.record.key)

        done = await asyncio.gather(*(close(info) for info in infos))
        return JSONResponse({"closed": [name for name, was in zip(names, done, strict=True) if was]})

    # --- one of them -------------------------------------------------------------------------------------------------

    async def _show(self, _request: Request, key: SessionKey) -> Response:
        (found,) = await session_view.view(self._sessions, [await self._sessions.session(key)])
        return JSONResponse(found)

    async def _close(self, _request: Request, key: SessionKey) -> Response:
        return JSONResponse({"closed": await self._sessions.close_session(key)})

    async def _interrupt(self, _request: Request, key: SessionKey) -> Response:
        return JSONResponse({"interrupted": await self._sessions.interrupt(key)})

    async def _restart(self, _request: Request, key: SessionKey) -> Response:
        return JSONResponse({"epoch": await self._sessions.restart(key)})

    async def _attempts(self, request: Request, key: SessionKey) -> Response:
        limit = _limit(query(request, {"limit"}).get("limit") or 100)
        found = await self._sessions.attempts(key, limit=limit)
        return JSONResponse({"attempts": [session_view.attempt(known) for known in found]})

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


def _idle(info: SessionInfo, since: float) -> bool:
    return info.running is None and not info.waiting and info.record.last_used_at <= since


def _phases(given: str | None) -> frozenset[str] | None:
    if given is None:
        return None
    phases = frozenset(part.strip() for part in given.split(","))
    if not phases <= set(Phase):
        raise Refused(400, f"phase is one or more of {', '.join(Phase)}")
    return phases


def _limit(value: object) -> int:
    if value is None:
        return MAX_LISTED
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LISTED:
        raise Refused(400, f"limit must be a number from 1 to {MAX_LISTED}")
    return value
