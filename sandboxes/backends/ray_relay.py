"""A node's one TCP port: bytes between a tool host and the agent of a sandbox, and the control connections.

Above: `ray_node`, which says what is behind it. Below: `ray_wire`, asyncio.

Whoever connects is hostile until it has signed its header: it gets one short line, five seconds and no memory beyond
that, and of many that only wait the oldest are cut off. Afterwards bytes are handed on as they come, each end only as
fast as the other takes them, and an end of one direction is handed on as such.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, cast

from sandboxes.backends import ray_names, ray_wire
from sandboxes.backends.base import Channel
from sandboxes.errors import BackendError, EngineUnavailable, NodeGone, SandboxError
from sandboxes.owner import Owner
from sandboxes.spec import Handle

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_WAITING = 128  # connections that have not signed yet
MAX_REQUESTS = 2048  # of one control connection at once
FLUSH_S = 15.0  # what is left for an end that does not read is dropped after so long
# A peer that the network has swallowed is noticed within 5 s: 2 idle, then 3 probes.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
USER_TIMEOUT_MS = 5000

Operation = Callable[[Mapping[str, Any]], Awaitable[Any]]


def tune(transport: asyncio.BaseTransport) -> None:
    """Lets a TCP connection notice a peer that is not there any more."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family == socket.AF_UNIX:
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


class Relay:
    """`connect` opens a channel to an agent, and `surely` says whether it is beyond doubt still its session's: who
    attaches is told. `operations` are what a control connection may ask for, by name.

    `node`: the first digits of this node's id. A header that names another is answered with NodeGone: it is about an
    earlier life of this machine.
    """

    def __init__(
        self,
        owner: Owner,
        node: str,
        connect: Callable[[Handle], Awaitable[Channel]],
        surely: Callable[[Handle], bool],
        operations: Mapping[str, Operation],
    ) -> None:
        self.owner = owner
        self.node = node
        self.connect = connect
        self.surely = surely
        self.operations = operations
        self.attached: dict[str, int] = {}  # connections by sandbox id
        self.refused = 0
        self.waiting: dict[_Connection, None] = {}
        self.open: set[_Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port, backlog=512)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.open):
            connection.abort()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class _Pipe(asyncio.Protocol):
    """One end of two that are joined: what it receives goes to the other's transport."""

    twin: _Pipe

    def __init__(self, own: asyncio.Transport, ended: Callable[[], None] | None = None) -> None:
        self._own = own
        self._ended = ended
        self._at_end = False

    def data_received(self, data: bytes) -> None:
        self.twin._own.write(data)

    def pause_writing(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.twin._own.pause_reading()

    def resume_writing(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.twin._own.resume_reading()

    def eof_received(self) -> bool:
        """Nothing more comes from here; the other direction may go on. After both, nobody else closes."""
        self._at_end = True
        other = self.twin._own
        if self.twin._at_end:
            other.close()
            return False
        if not other.is_closing():
            with contextlib.suppress(OSError, RuntimeError):
                other.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        other = self.twin._own
        other.close()
        asyncio.get_running_loop().call_later(FLUSH_S, other.abort)
        if self._ended is not None:
            self._ended()


def _join(outer: asyncio.Transport, channel: Channel, ended: Callable[[], None]) -> None:
    inner = cast(asyncio.Transport, channel.writer.transport)
    one, two = _Pipe(outer, ended), _Pipe(inner, functools.partial(_forget, channel))
    one.twin, two.twin = two, one
    inner.set_protocol(two)
    outer.set_protocol(one)


def _forget(channel: Channel) -> None:
    """Holds it until then: a channel's writer closes its transport when nobody holds it."""


class _Connection(asyncio.Protocol):
    """Someone who has connected: first unknown, then joined to an agent or in control."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._searched = 0
        self._number = ray_wire.challenge()
        self._timer: asyncio.TimerHandle | None = None
        self._work: asyncio.Task[None] | None = None
        self._requests: dict[int, asyncio.Task[None]] | None = None  # of a control connection

    # --- unknown -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        relay = self._relay
        relay.open.add(self)
        relay.waiting[self] = None
        if len(relay.waiting) > MAX_WAITING:
            next(iter(relay.waiting)).abort()
        tune(transport)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self.abort)
        self._transport.write(ray_wire.greeting(self._number))

    def abort(self) -> None:
        self._relay.waiting.pop(self, None)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._requests is not None:
            self._read_requests()
            return
        end = self._received.find(b"\n")
        if self._work is not None or (end < 0 and len(self._received) > ray_wire.MAX_LINE) or end > ray_wire.MAX_LINE:
            self._refuse()
        elif end >= 0:
            line, rest = bytes(self._received[: end + 1]), self._received[end + 1 :]
            if rest:  # it has not heard yet that it may go on
                self._refuse()
                return
            self._received.clear()
            self._header(line)

    def _header(self, line: bytes) -> None:
        relay = self._relay
        try:
            mac, body, fields = ray_wire.split(line)
            op, handle = str(fields.get("op")), None
            if op == ray_wire.ATTACH:
                handle = ray_names.loaded(fields.get("handle"))
            elif op != ray_wire.CONTROL:
                raise ray_wire.Refused("an unknown request")
            mac_key = ray_wire.key(relay.owner, op, handle.sandbox_id if handle is not None else "")
            ray_wire.check(mac, mac_key, self._number, body)
            nonce = fields.get("nonce")
            if not isinstance(nonce, str) or not 16 <= len(nonce) <= 64:
                raise ray_wire.Refused("no nonce")
        except (ray_wire.Refused, ValueError):
            self._refuse()
            return
        relay.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if fields.get("node") != relay.node:
            self._answer(mac_key, nonce, ray_wire.error_fields(NodeGone("the node has been started anew")))
            self._transport.close()
        elif handle is None:
            self._requests = {}
            self._answer(mac_key, nonce, {"ok": True})
        else:
            self._transport.pause_reading()
            self._work = relay.spawn(self._attach(handle, mac_key, nonce))

    def _refuse(self) -> None:
        """One short line, the same whatever was wrong."""
        self._relay.refused += 1
        self._transport.write(ray_wire.frame({"error": "refused"}))
        self._transport.close()

    def _answer(self, mac_key: bytes, nonce: str, fields: dict[str, Any]) -> None:
        self._transport.write(ray_wire.signed(mac_key, nonce, fields))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        relay = self._relay
        relay.open.discard(self)
        relay.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._work is not None:
            self._work.cancel()

    # --- joined to an agent ------------------------------------------------------------------------------------------

    async def _attach(self, handle: Handle, mac_key: bytes, nonce: str) -> None:
        relay = self._relay
        try:
            channel = await relay.connect(handle)
        except SandboxError as error:
            self._answer(mac_key, nonce, ray_wire.error_fields(error))
            self._transport.close()
            return
        if self._transport.is_closing():
            await channel.close()
            return
        self._answer(mac_key, nonce, {"ok": True, "sure": relay.surely(handle)})
        attached = relay.attached
        attached[handle.sandbox_id] = attached.get(handle.sandbox_id, 0) + 1

        def ended() -> None:
            relay.open.discard(self)
            attached[handle.sandbox_id] -= 1
            if not attached[handle.sandbox_id]:
                del attached[handle.sandbox_id]

        # The agent says nothing before it was greeted, so nothing of it is in the channel's reader.
        _join(self._transport, channel, ended)
        self._transport.resume_reading()

    # --- in control --------------------------------------------------------------------------------------------------

    def _read_requests(self) -> None:
        while (end := self._received.find(b"\n", self._searched)) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            self._searched = 0
            try:
                fields = json.loads(line)
                ident, op, arguments = int(fields["id"]), str(fields["op"]), fields.get("args")
            except (ValueError, KeyError, TypeError, RecursionError):
                self.abort()
                return
            self._request(ident, op, arguments if isinstance(arguments, dict) else {})
        self._searched = len(self._received)
        if len(self._received) > ray_wire.MAX_REQUEST:
            self.abort()

    def _request(self, ident: int, op: str, arguments: Mapping[str, Any]) -> None:
        assert self._requests is not None
        if op == "cancel":
            if (task := self._requests.get(ident)) is not None:
                task.cancel()
            return
        if len(self._requests) >= MAX_REQUESTS or ident in self._requests:
            self.abort()
            return
        self._requests[ident] = self._relay.spawn(self._perform(ident, op, arguments))

    async def _perform(self, ident: int, op: str, arguments: Mapping[str, Any]) -> None:
        assert self._requests is not None
        answer: dict[str, Any]
        try:
            operation = self._relay.operations.get(op)
            if operation is None:
                raise BackendError(f"the node does not know {op[:40]!r}: its toolhost is of another version")
            answer = {"ok": await operation(arguments)}
        except SandboxError as error:
            if isinstance(error, EngineUnavailable):
                log.warning("%s: %s", op, error.message, exc_info=error.__cause__)
            answer = ray_wire.error_fields(error)
        except asyncio.CancelledError:
            answer = ray_wire.error_fields(EngineUnavailable("it was cancelled"))
        except Exception as error:  # one that nobody foresaw must not leave its caller waiting
            log.exception("node operation %s", op)
            answer = ray_wire.error_fields(EngineUnavailable(f"the node failed: {type(error).__name__}"))
        finally:
            self._requests.pop(ident, None)
        if not self._transport.is_closing():
            self._transport.write(ray_wire.frame({"id": ident, **answer}))
