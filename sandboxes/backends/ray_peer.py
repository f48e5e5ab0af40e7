"""A tool host's connections to a node's relay: one to control it, and one for every channel to an agent.

Above: `ray`. Below: `ray_wire`, asyncio. Nothing of Ray is here: what runs is reached without a head.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from sandboxes.agent.wire import MAX_FRAME_TO_HOST
from sandboxes.backends import ray_wire
from sandboxes.backends.base import StreamChannel
from sandboxes.backends.ray_names import Place, stored
from sandboxes.backends.ray_relay import tune
from sandboxes.errors import EngineUnavailable, SandboxError
from sandboxes.owner import Owner
from sandboxes.spec import Handle

CONNECT_S = 1.5  # the kernel there answers this, and a lost packet is sent again after 1 s
GREET_S = 6.0
ATTACH_S = 12.0
JUST_S = 1.0  # what a node was sure of is not relied on when it was longer on its way: the link may have been lost


class Unreachable(EngineUnavailable):
    """Nobody answers at the relay's address. `refused`: the machine said so itself, so nothing listens there."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class NodeChannel(StreamChannel):
    """`sure`: whether the node has just known beyond doubt that the session's lease is at it."""

    sure = False


async def attach(owner: Owner, place: Place, handle: Handle) -> NodeChannel:
    """A new channel to the agent of this very instance. Raises StateLost, NodeGone, Unreachable, EngineUnavailable."""
    began = time.monotonic()
    fields = {"op": ray_wire.ATTACH, "node": place.node, "handle": stored(handle)}
    mac_key = ray_wire.key(owner, ray_wire.ATTACH, handle.sandbox_id)
    reader, writer, answer = await _greeted(place, mac_key, fields, ATTACH_S, MAX_FRAME_TO_HOST)
    channel = NodeChannel(reader, writer, owner.nonce(handle.sandbox_id))
    channel.sure = sure(answer, began)
    return channel


def sure(answer: Mapping[str, Any], began: float) -> bool:
    """Whether a node's answer to what was asked at `began` (of `time.monotonic`) says that it is sure of a session."""
    return answer.get("sure") is True and time.monotonic() - began <= JUST_S


async def _greeted(
    place: Place, mac_key: bytes, fields: dict[str, Any], answer_s: float, limit: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(place.host, place.port, limit=limit)
    except ConnectionRefusedError:
        raise Unreachable(f"nothing listens at {place}", refused=True) from None
    except (OSError, TimeoutError) as error:
        raise Unreachable(f"{place} cannot be reached ({error or 'no answer'})", refused=False) from None
    try:
        tune(writer.transport)
        async with asyncio.timeout(GREET_S):
            number = ray_wire.read_greeting(await _line(reader))
        nonce = secrets.token_hex(16)
        writer.write(ray_wire.signed(mac_key, number, {**fields, "nonce": nonce}))
        async with asyncio.timeout(answer_s):
            line = await _line(reader)
        if b'"refused"' in line[:40]:
            raise ray_wire.Refused("it has another secret")
        mac, body, answer = ray_wire.split(line)
        ray_wire.check(mac, mac_key, nonce, body)
        if "error" in answer:
            raise ray_wire.read_error(answer)
    except ray_wire.Refused as error:
        writer.close()
        raise EngineUnavailable(
            f"the relay {place} and this host do not know each other: {error}. Both must have the same owner file"
        ) from None
    except TimeoutError:
        writer.close()
        raise Unreachable(f"the relay {place} does not answer", refused=False) from None
    except (OSError, EOFError, ValueError):
        writer.close()
        raise Unreachable(f"the relay {place} ended the connection", refused=False) from None
    except BaseException:
        writer.close()
        raise
    return reader, writer, answer


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


class Peer:
    """The control connection to one node, made when it is needed, and again when it broke."""

    def __init__(self, owner: Owner, place: Place) -> None:
        self.place = place
        self._owner = owner
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def call(self, op: str, deadline_s: float, **arguments: Any) -> Any:
        """Raises what the node raises, Unreachable, EngineUnavailable. Cancelled, the operation goes on there."""
        writer = await self._connected()
        waiting = self._waiting
        ident = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting[ident] = answer
        line = ray_wire.frame({"id": ident, "op": op, "args": arguments})
        if len(line) > ray_wire.MAX_REQUEST:
            raise EngineUnavailable("the request is too large for the node")
        writer.write(line)
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            writer.write(ray_wire.frame({"id": ident, "op": "cancel"}))
            raise EngineUnavailable(f"the node {self.place} did not finish {op} in {deadline_s:g} s") from None
        finally:
            waiting.pop(ident, None)
            if answer.done() and not answer.cancelled():
                answer.exception()

    async def close(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None or self._writer.is_closing():
                mac_key = ray_wire.key(self._owner, ray_wire.CONTROL, "")
                fields = {"op": ray_wire.CONTROL, "node": self.place.node}
                reader, self._writer, _ = await _greeted(self.place, mac_key, fields, GREET_S, ray_wire.MAX_REPLY)
                self._waiting = {}
                self._reading = asyncio.create_task(self._read(reader, self._writer), name="ray peer")
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting = self._waiting
        try:
            while line := await reader.readline():
                fields = json.loads(line)
                found = waiting.get(fields.get("id"))
                if found is None or found.done():
                    continue
                if "error" in fields:
                    found.set_exception(ray_wire.read_error(fields))
                else:
                    found.set_result(fields.get("ok"))
        except (OSError, ValueError):
            pass
        finally:
            writer.close()
            if self._writer is writer:
                self._writer = None
            broken: SandboxError = Unreachable(f"the connection to {self.place} ended", refused=False)
            for found in waiting.values():
                if not found.done():
                    found.set_exception(broken)
