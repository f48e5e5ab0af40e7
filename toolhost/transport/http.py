"""MCP over Streamable HTTP, for clients that connect directly: the SDK's session managers behind our keys.

Above: `app`. Below: `mcp_server`, `identity`, `auth`, `errors`, the SDK.

The session is named by a header, else by `/s/{session}` in the URL, else by the `Mcp-Session-Id` that the SDK gave out
at `initialize`. The 2026-07-28 protocol has no session id at all: there a request without a header or URL key is a
session of its own, which ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import INVALID_REQUEST

from sandboxes.spec import KeyKind, Retention, SessionKey, SessionRequest
from toolhost.auth import Authenticator
from toolhost.config import Settings
from toolhost.errors import Refused
from toolhost.identity import Headers, Refusal, identify
from toolhost.mcp_server import CALLER, Caller
from toolhost.namespaces.base import SessionAttachment
from toolhost.transport.asgi import Attach, Message, Receive, Scope, Send, address_of, respond_json
from toolhost.transport.jsonid import has_id
from toolhost.transport.paths import Endpoint

MCP_SESSION = b"mcp-session-id"
REMEMBERED = 10_000  # MCP sessions; of more, who has the most loses the one unused for longest
STOP_S = 5.0
ACCEPTED = 202  # the SDK's answer to a notification, which is what it takes a request for whose id is none
WRONG_ID = {"code": INVALID_REQUEST, "message": "The id must be a string or an integer. Nothing ran."}


@dataclass(slots=True)
class _McpSession:
    """What an `Mcp-Session-Id` stands for: the SDK's session; an attachment once it has called without another key."""

    manager: StreamableHTTPSessionManager
    attachment: SessionAttachment | None = None


class HttpTransport:
    """Every Streamable HTTP endpoint of the host: `everything` on bare `/mcp`, `servers` by namespace."""

    def __init__(
        self,
        everything: Server[None],
        servers: Mapping[str, Server[None]],
        *,
        settings: Settings,
        auth: Authenticator,
        attach: Attach,
    ) -> None:
        self._managers: dict[str | None, StreamableHTTPSessionManager] = {None: _manager(everything, settings)}
        self._managers.update({name: _manager(server, settings) for name, server in servers.items()})
        self._settings = settings
        self._auth = auth
        self._attach = attach
        # By principal and id, the one unused for longest first. A principal without any is not in it.
        self._sessions: dict[str, OrderedDict[str, _McpSession]] = {}
        self._stop = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Starts the SDK's managers, in a task of their own: their task groups must end in the task that began them."""
        started = asyncio.Event()
        self._runner = asyncio.create_task(self._run(started), name="streamable-http")
        await started.wait()

    async def close(self) -> None:
        """Ends every session and stream, within a bound."""
        self._stop.set()
        runner, self._runner = self._runner, None
        if runner is not None:
            await asyncio.wait((runner,), timeout=STOP_S)
        while self._sessions:
            principal, own = next(iter(self._sessions.items()))
            await self._let_go(principal, next(iter(own)))

    async def _run(self, started: asyncio.Event) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for manager in self._managers.values():
                await stack.enter_async_context(manager.run())
            started.set()
            await self._stop.wait()

    async def handle(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. Raises Refused before it has begun."""
        manager = self._managers.get(endpoint.namespace)
        if manager is None:
            known = ", ".join("/mcp" if name is None else f"/{name}/mcp" for name in self._managers)
            raise Refused(404, f"no namespace {str(endpoint.namespace)[:64]!r} here; there is {known}")
        if self._runner is None:
            raise Refused(503, "the host is stopping", headers=(("retry-after", "5"),))
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        principal = self._auth.authenticate(headers, address_of(scope)).name
        session_id = self._session_id(headers, principal)
        caller, passing = self._caller(endpoint, headers, principal, session_id)
        watch = _Watch(receive, send, partial(self._remember, principal, manager))
        try:
            await manager.handle_request({**scope, CALLER: caller}, watch.receive, watch.send)
        finally:
            if passing is not None:
                await passing.gone()
        if scope["method"] == "DELETE" and session_id is not None and watch.status < 300:
            await self._let_go(principal, session_id)

    def _session_id(self, headers: Headers, principal: str) -> str | None:
        """The MCP session that a request is in. Raises Refused when it is not, or no longer, this principal's."""
        values = {value.decode("latin-1") for name, value in headers if name == MCP_SESSION}
        if not values:
            return None
        session_id = values.pop()
        own = self._sessions.get(principal, OrderedDict())
        if values or session_id not in own:
            raise Refused(404, "no such MCP session: send `initialize` again; a session key finds its variables")
        own.move_to_end(session_id)
        return session_id

    def _caller(
        self, endpoint: Endpoint, headers: Headers, principal: str, session_id: str | None
    ) -> tuple[Caller, SessionAttachment | None]:
        """What the request brings to its calls, and the attachment that ends with it."""
        own = secrets.token_hex(16)
        identity = identify(
            headers,
            principal=principal,
            settings=self._settings,
            connection_id=own,
            url_session=endpoint.session,
        )
        caller = Caller(None, rich=True, max_calls=self._settings.server.max_calls, domains=identity.domains)
        if isinstance(identity.session, Refusal):
            caller.refusal = identity.session.text
            return caller, None
        request = identity.session
        if request.key.kind is not KeyKind.CONNECTION:
            # Requests come and go: that one is over says nothing of the session, which its idle time ends.
            retention = Retention.CHOSEN if request.retention is Retention.REQUEST else request.retention
            caller.attachment = self._attach(replace(request, retention=retention))
            return caller, None
        if session_id is None:
            caller.attachment = self._attach(request)
            return caller, caller.attachment
        known = self._sessions[principal][session_id]
        if known.attachment is None:
            key = SessionKey(principal, KeyKind.CONNECTION, session_id)
            known.attachment = self._attach(SessionRequest(key, Retention.CONNECTION, request.ttl_s))
        caller.attachment = known.attachment
        return caller, None

    async def _remember(self, principal: str, manager: StreamableHTTPSessionManager, session_id: str) -> None:
        """Before the client can know the id: it may send its next request while this one is still being answered."""
        own = self._sessions.setdefault(principal, OrderedDict())
        if session_id in own:
            return
        own[session_id] = _McpSession(manager)
        if sum(map(len, self._sessions.values())) > REMEMBERED:
            greediest = max(self._sessions, key=lambda name: len(self._sessions[name]))
            oldest = next(iter(self._sessions[greediest]))
            known = await self._let_go(greediest, oldest)
            if known is not None:
                await _end(known.manager, oldest)

    async def _let_go(self, principal: str, session_id: str) -> _McpSession | None:
        own = self._sessions.get(principal, OrderedDict())
        known = own.pop(session_id, None)
        if not own:
            self._sessions.pop(principal, None)
        if known is not None and known.attachment is not None:
            await known.attachment.gone()
        return known


async def _end(manager: StreamableHTTPSessionManager, session_id: str) -> None:
    """Ends the SDK's own session, as its client would."""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_message: Message) -> None:
        """Nobody waits for the answer."""

    headers = [(MCP_SESSION, session_id.encode())]
    scope = {"type": "http", "method": "DELETE", "path": "/", "query_string": b"", "headers": headers}
    await manager.handle_request(scope, receive, send)


def _manager(server: Server[None], settings: Settings) -> StreamableHTTPSessionManager:
    return StreamableHTTPSessionManager(
        server,
        max_request_body_size=settings.server.max_body_bytes,
        session_idle_timeout=settings.lifecycle.idle_s,
        max_sessions=None,  # the transport bounds them, fairly
    )


class _Watch:
    """One request and its answer on their way: keeps the answer's status, says which MCP session it names before the
    client can read of it, and answers what the SDK takes for a notification, because its id is none."""

    def __init__(self, receive: Receive, send: Send, on_session: Callable[[str], Awaitable[None]]) -> None:
        self._receive = receive
        self._send = send
        self._on_session = on_session
        self._body: list[bytes] = []
        self._answered = False
        self.status = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body.append(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if self._answered:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status == ACCEPTED and has_id(b"".join(self._body)):
                self._answered = True
                self.status = 400
                await respond_json(self._send, self.status, {"jsonrpc": "2.0", "id": None, "error": WRONG_ID})
                return
            for name, value in message.get("headers", ()):
                if name.lower() == MCP_SESSION and self.status < 300:
                    await self._on_session(value.decode("latin-1"))
        await self._send(message)
