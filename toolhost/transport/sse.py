"""MCP over server-sent events, as inference servers speak it: an open GET, and a POST route of the host's own.

Above: `app`. Below: `mcp_server`, `identity`, `auth`, `errors`.

A POST to one's own live connection is always answered 202: several client SDKs swallow any other status and wait for
ever. What is wrong goes on the stream as the JSON-RPC error of the message's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mcp.server.lowlevel.server import Server
from mcp.server.models import InitializationOptions
from mcp.server.runner import serve_loop
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import INVALID_REQUEST, PARSE_ERROR, JSONRPCNotification, jsonrpc_message_adapter
from pydantic import ValidationError

from toolhost.auth import Authenticator
from toolhost.config import Settings
from toolhost.errors import Refused
from toolhost.identity import Headers, Named, Refusal, identify, label, named
from toolhost.mcp_server import Caller, ToolSet, Traced, tools_of
from toolhost.tracing import context_of
from toolhost.transport.asgi import Attach, Receive, Scope, Send, accept, address_of
from toolhost.transport.direct import Direct
from toolhost.transport.jsonid import IdScanner, find_id, has_half_characters, has_id
from toolhost.transport.paths import MESSAGES, Endpoint
from toolhost.transport.streams import PING, Inbox, Outbox

log = logging.getLogger("toolhost.sse")

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold events back
]
CLOSE_S = 5.0  # for connections to end when the host stops
# What a connection may have the host hold for it: messages not taken yet, and answers that its client does not read.
MAX_WAITING = 1000
MAX_WAITING_BYTES = 16 << 20
DIFFERENT_SESSION = (
    "The session header of this request differs from the one that its connection was opened with. Nothing ran. "
    "Open a connection of its own for another session."
)


class Connection:
    """One client's open stream. Lives as long as its GET; everything of it is freed then."""

    def __init__(
        self,
        ident: str,
        principal: str,
        url_session: str | None,
        naming: Named | Refusal | None,
        caller: Caller,
        tools: ToolSet,
        send: Send,
    ) -> None:
        self.id = ident
        self.principal = principal
        self.url_session = url_session
        self.naming = naming
        self.caller = caller
        self.inbox = Inbox()
        self.outbox = Outbox(send)
        self.direct = Direct(tools, caller, self.outbox)
        self.metadata = ServerMessageMetadata(request_context=caller)
        self.done = asyncio.Event()

    @property
    def overloaded(self) -> bool:
        """Whether the host holds more for it than it may."""
        inbox, outbox = self.inbox, self.outbox
        return (
            inbox.waiting + outbox.waiting > MAX_WAITING
            or inbox.waiting_bytes + outbox.waiting_bytes > MAX_WAITING_BYTES
        )

    def close(self) -> None:
        """Ends the stream; what runs for it is cancelled."""
        self.inbox.close()
        self.direct.close()

    def cut(self) -> None:
        """Ends the stream of a client that does not read it: nothing more is written."""
        self.outbox.closed = True
        self.close()


class SseTransport:
    """Every SSE connection of the host. Made by `app`, closed by the composition root."""

    def __init__(
        self, servers: Mapping[str, Server[None]], *, settings: Settings, auth: Authenticator, attach: Attach
    ) -> None:
        self._served: dict[str, tuple[Server[None], InitializationOptions]] = {
            name: (server, server.create_initialization_options()) for name, server in servers.items()
        }
        self._settings = settings
        self._auth = auth
        self._attach = attach
        self._connections: dict[str, Connection] = {}
        self._held: Counter[str] = Counter()  # connections of each principal
        self._closing = False

    def __len__(self) -> int:
        return len(self._connections)

    async def close(self) -> None:
        """Ends every stream, within a bound. New ones are refused from now on."""
        self._closing = True
        connections = list(self._connections.values())
        for connection in connections:
            connection.close()
        waits = [asyncio.ensure_future(connection.done.wait()) for connection in connections]
        if waits:
            _, late = await asyncio.wait(waits, timeout=CLOSE_S)
            for wait in late:
                wait.cancel()

    # --- the GET ---------------------------------------------------------------------------------------------------

    async def connect(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one stream until the client goes or the host stops. Raises Refused before it has begun."""
        if self._closing:
            raise Refused(503, "the host is stopping", headers=(("retry-after", "5"),))
        server, options = self._server(endpoint)
        headers: Headers = scope["headers"]
        principal = self._auth.authenticate(headers, address_of(scope))
        self._admit(principal.name)
        connection = self._open(endpoint, headers, principal.name, tools_of(server), send)
        self._connections[connection.id] = connection
        self._held[connection.principal] += 1
        watch = asyncio.create_task(self._watch(connection, receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await connection.outbox.write(b"event: endpoint\r\ndata: %b\r\n\r\n" % self._post_path(connection, scope))
            await serve_loop(
                server,
                connection.inbox,
                connection.outbox,
                lifespan_state=None,
                init_options=options,
            )
            await connection.direct.ended()
            with contextlib.suppress(TimeoutError):  # a client that does not read: the server closes its connection
                async with asyncio.timeout(CLOSE_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watch.cancel()
            await self._forget(connection)

    def _server(self, endpoint: Endpoint) -> tuple[Server[None], InitializationOptions]:
        name = endpoint.namespace or self._settings.server.root_namespace
        served = self._served.get(name)
        if served is None:
            known = ", ".join(f"/{name}/sse" for name in self._served)
            raise Refused(404, f"no namespace {name[:64]!r} here; there is {known}")
        return served

    def _admit(self, principal: str) -> None:
        server = self._settings.server
        most, limit = server.max_connections_per_principal, "server.max_connections_per_principal"
        held = self._held.get(principal, 0)
        if len(self._connections) >= server.max_connections:
            held, most, limit = len(self._connections), server.max_connections, "server.max_connections"
        if held >= most:
            log.warning("too many connections", extra={"fields": {"principal": principal, "limit": most}})
            text = f"{held} connections are open, which is the limit ({limit}); close some, or try again later"
            raise Refused(503, text, headers=(("retry-after", "5"),))

    def _open(self, endpoint: Endpoint, headers: Headers, principal: str, tools: ToolSet, send: Send) -> Connection:
        ident = secrets.token_hex(20)
        naming = named(headers, endpoint.session)
        identity = identify(
            headers,
            principal=principal,
            settings=self._settings,
            connection_id=ident,
            url_session=endpoint.session,
        )
        max_calls = self._settings.server.max_calls
        caller = Caller(None, rich=identity.rich, max_calls=max_calls, domains=identity.domains)
        if isinstance(identity.session, Refusal):
            caller.refusal = identity.session.text
        else:
            caller.attachment = self._attach(identity.session)
        if log.isEnabledFor(logging.DEBUG):
            session = label(caller.attachment.key) if caller.attachment else None
            log.debug("connected", extra={"fields": {"session": session, "connection": ident[:8]}})
        return Connection(ident, principal, endpoint.session, naming, caller, tools, send)

    def _post_path(self, connection: Connection, scope: Scope) -> bytes:
        server = self._settings.server
        prefix = server.public_path or server.root_path or scope.get("root_path", "").rstrip("/")
        return f"{prefix}/{MESSAGES}/{connection.id}".encode()

    async def _watch(self, connection: Connection, receive: Receive) -> None:
        """Pings an open stream and ends it when the client goes."""
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while not gone.done():
                await asyncio.wait((gone,), timeout=self._settings.server.ping_s)
                if not gone.done():
                    await connection.outbox.write(PING)
        finally:
            gone.cancel()
            connection.outbox.closed = True
            connection.close()

    async def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection.id, None)
        self._held[connection.principal] -= 1
        if not self._held[connection.principal]:
            del self._held[connection.principal]
        connection.outbox.closed = True
        connection.direct.close()
        try:
            await connection.direct.ended()
            if connection.caller.attachment is not None:
                await connection.caller.attachment.gone()
        finally:
            connection.done.set()

    # --- the POST --------------------------------------------------------------------------------------------------

    async def post(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes one message for a connection. Raises Refused: 401, 404."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        principal = self._auth.authenticate(headers, address_of(scope))
        connection = self._connections.get(endpoint.connection or "")
        if connection is None or connection.inbox.closed or connection.principal != principal.name:
            raise Refused(404, "no such connection: open a new stream (GET …/sse) and use the path that it names")
        body = await _read(receive, self._settings.server.max_body_bytes)
        if body is None:
            return  # the client went in the middle of its message
        await accept(send)
        if isinstance(body, _Oversized):
            await self._oversized(connection, body)
        else:
            await self._deliver(connection, body, headers)

    async def _deliver(self, connection: Connection, body: bytes, headers: Headers) -> None:
        naming = named(headers, connection.url_session)
        same = naming is None or naming == connection.naming
        if same:
            self._check_load(connection)
            if await connection.direct.take(body, headers):
                return
        try:
            message = jsonrpc_message_adapter.validate_json(body, by_name=False)
        except ValidationError as error:
            malformed = error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid"
            code, what = (PARSE_ERROR, "is not valid JSON") if malformed else (INVALID_REQUEST, "is not JSON-RPC 2.0")
            if malformed and has_half_characters(body):
                what = "has half of a surrogate pair, which is no character"
            await connection.outbox.send_error(find_id(body), code, f"The message {what}. Nothing ran.")
            return
        if isinstance(message, JSONRPCNotification) and has_id(body):
            what = "The id must be a string or an integer. Nothing ran."
            await connection.outbox.send_error(find_id(body), INVALID_REQUEST, what)
            return
        metadata = connection.metadata
        if not same:
            metadata = ServerMessageMetadata(request_context=connection.caller.refusing(DIFFERENT_SESSION))
        elif trace := context_of(headers):
            metadata = ServerMessageMetadata(request_context=Traced(connection.caller, trace))
        connection.inbox.put(SessionMessage(message, metadata=metadata), len(body))
        self._check_load(connection)

    @staticmethod
    def _check_load(connection: Connection) -> None:
        if connection.overloaded:
            fields = {"connection": connection.id[:8], "principal": connection.principal}
            log.warning("a client sends and does not read: its stream is closed", extra={"fields": fields})
            connection.cut()

    async def _oversized(self, connection: Connection, body: _Oversized) -> None:
        limit = self._settings.server.max_body_bytes
        log.warning("oversized message", extra={"fields": {"bytes": body.size, "limit": limit}})
        if body.id is None:
            connection.close()  # nobody can be told: an ended stream is an answer too
            return
        await connection.outbox.send_error(
            body.id,
            INVALID_REQUEST,
            f"The message has {body.size} bytes; at most {limit} are taken. Nothing ran. Send less, or put large data "
            "into a file of the session first.",
        )


@dataclass(frozen=True, slots=True)
class _Oversized:
    size: int
    id: str | int | None


async def _read(receive: Receive, limit: int) -> bytes | _Oversized | None:
    """A request's body; only its id when it is longer than `limit`; None when the client went."""
    pieces: list[bytes] = []
    size = 0
    scanner: IdScanner | None = None
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if scanner is None:
            pieces.append(piece)
            if size > limit:
                scanner = IdScanner()
                for kept in pieces:
                    scanner.feed(kept)
                pieces.clear()
        else:
            scanner.feed(piece)
        if not message.get("more_body", False):
            return b"".join(pieces) if scanner is None else _Oversized(size, scanner.end())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
