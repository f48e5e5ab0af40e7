"""The host's end of the wire: one connection to one agent; requests by id, many waiters, streamed output.

Above: `manager` and `session`. Below: `agent.wire`, `codec`, a backend's channel.

What an agent sends is hostile. A line is size-capped while it is read, every field is checked, and whatever is not of
the protocol ends the connection with WireError for all who wait: nothing else of the host notices. A reply for which
nobody waits is dropped. No method waits without a bound.

A lost connection loses nothing: the execution goes on inside, and its result is kept until `ack`. ChannelLost tells
the caller to connect again and `attach`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sandboxes import codec
from sandboxes.agent import wire
from sandboxes.backends.base import Channel, PromptReader
from sandboxes.errors import (
    AttemptConflict,
    AttemptUnknown,
    CallRefused,
    ChannelLost,
    ChannelStalled,
    FileMissing,
    FileTooLarge,
    NoCapacity,
    SandboxError,
    StateLost,
    WireError,
)
from sandboxes.events import OnEvent, Printed, Started
from sandboxes.spec import Outcome, PythonCall, ShellCall

_T = TypeVar("_T")

REPLY_S = 10.0  # a plain request's answer; an agent answers these at once, whatever user code does
START_S = 60.0  # from `accepted` to `started`: the interpreter may have to be started first, with its pre-imports
MARGIN_S = 10.0  # beyond the deadline and the ladder, before the connection counts as lost
CONNECT_S = 15.0
PIECES_AHEAD = 8  # data frames that wait for a slow reader of a file, before the connection waits with them
REPLIES_AHEAD = PIECES_AHEAD + 4  # more of them, output not counted, no request has
READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Hello:
    """What an agent says of itself when a connection opens. `claim` is (ticket, session) once it was given to one."""

    sandbox: str
    python: str
    state: str
    claim: tuple[str, str] | None
    epoch: int
    sequence: int
    running: str | None
    kept: tuple[str, ...]
    acks: bool = False  # it takes acknowledgements with an execution


@dataclass(frozen=True, slots=True)
class Bound:
    """How long an execution may take: its own deadline, and one step of the ladder. Seconds."""

    timeout_s: float
    grace_s: float = 2.0

    @property
    def backstop_s(self) -> float:
        return self.timeout_s + 2 * self.grace_s + MARGIN_S


class _Waiter:
    """Who waits for the replies to one request. Frames that come before it looks are kept: at most `PIECES_AHEAD` of
    data, then the connection waits."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[codec.Fields | SandboxError] = asyncio.Queue()
        self.data = asyncio.Semaphore(PIECES_AHEAD)

    def take(self, frame: codec.Fields) -> None:
        """Raises WireError."""
        if frame["t"] == "output":
            return
        if self.frames.qsize() > REPLIES_AHEAD:
            raise WireError("the agent sent more replies than a request has")
        self.frames.put_nowait(frame)

    def fail(self, error: SandboxError) -> None:
        self.frames.put_nowait(error)


class _Execution:
    """Who waits for one execution. The frames on its way are dealt with as they come, and output is never kept.

    After `accepted` an earlier execution may still run, perhaps another host's (this one then waits its turn inside):
    its own bound begins when it started. `late` is called with it when the time is over. Nothing that it holds holds
    it: what a call leaves behind goes at once, and not with a search for what can be reached.
    """

    def __init__(
        self, attempt: str, bound: Bound, on_event: OnEvent | None, late: Callable[[_Execution], object]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.attempt = attempt
        self._bound = bound
        self._on_event = on_event
        self._late = late
        self._replies = 0
        self.accepted = self.started = False
        self.asking: asyncio.Task[None] | None = None  # whether it waits its turn
        self._loop = loop
        self._until = loop.time() + REPLY_S
        self._timer = loop.call_at(self._until, self._due)
        self.end: asyncio.Future[codec.Fields] = loop.create_future()  # its result or error, as a frame

    def take(self, frame: codec.Fields) -> None:
        """Raises WireError, ValueError."""
        kind = frame["t"]
        if kind == "output":
            if self._on_event is not None:
                self._on_event(Printed(self.attempt, codec.text(frame, "text")[: wire.OUTPUT_PIECE]))
            else:
                codec.text(frame, "text")
            return
        self._replies += 1
        if self._replies > REPLIES_AHEAD:
            raise WireError("the agent sent more replies than a request has")
        if kind == "accepted":
            self.accepted = True
            self._until = self._loop.time() + START_S + self._bound.backstop_s
        elif kind == "started":
            started = _read_started(self.attempt, frame)
            self.started = True
            self._until = self._loop.time() + self._bound.backstop_s
            if self._on_event is not None:
                self._on_event(started)
        elif kind != "result" and kind != "error":
            raise WireError(f"the agent broke the protocol: {kind} in answer to an execution")
        elif not self.end.done():
            self.end.set_result(frame)

    def fail(self, error: SandboxError) -> None:
        if not self.end.done():
            self.end.set_exception(error)

    def close(self) -> None:
        self._timer.cancel()
        if self.asking is not None:
            self.asking.cancel()

    def wait_on(self, seconds: float) -> None:
        """It has so much more time."""
        self._until = max(self._until, self._loop.time() + seconds)
        self._timer = self._loop.call_at(self._until, self._due)

    def _due(self) -> None:
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._due)
        elif not self.end.done():
            self._late(self)


class AgentClient:
    """One open connection. Made by `connect`; closed once by who made it."""

    def __init__(self, channel: Channel, hello: Hello, on_lost: Callable[[], None] | None) -> None:
        """Use `connect`."""
        self.hello = hello
        self._channel = channel
        self._on_lost = on_lost
        # Not from 1: two hosts may hear each other's answers, where a sandbox has one channel (`docker attach`).
        self._ids = itertools.count(1 + secrets.randbits(48))
        self._waiters: dict[int, _Waiter | _Execution] = {}
        self._failure: SandboxError | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lines: _Lines

    @classmethod
    async def connect(cls, channel: Channel, *, on_lost: Callable[[], None] | None = None) -> AgentClient:
        """The handshake. Takes the channel over, also when it raises WireError, ChannelLost or StateLost."""
        try:
            async with asyncio.timeout(CONNECT_S):
                channel.writer.write(wire.encode({"t": "hello", "v": wire.VERSION, "nonce": channel.nonce, "id": 0}))
                await channel.writer.drain()
                lines = _Lines(channel.reader)
                hello = _read_hello(await lines.next())
        except TimeoutError:
            await channel.close()
            raise ChannelStalled("the agent did not answer the handshake in time") from None
        except (OSError, EOFError):
            await channel.close()
            raise ChannelLost("the connection ended during the handshake") from None
        except BaseException:
            await channel.close()
            raise
        client = cls(channel, hello, on_lost)
        client._lines = lines
        client._reading = asyncio.create_task(client._read(), name="agent-client")
        if isinstance(channel.reader, PromptReader):
            channel.reader.taker = client._take
        return client

    @property
    def alive(self) -> bool:
        return self._failure is None

    async def close(self) -> None:
        """Ends the connection; the sandbox lives on. Idempotent, never raises."""
        self._on_lost = None
        self._fail(ChannelLost("the connection was closed"))
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await self._channel.close()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def ping(self) -> None:
        await self._ask("ping")

    async def claim(self, ticket: str, session: str, epoch: int, sequence: int) -> None:
        """Binds the sandbox to a session. Raises StateLost when it belongs to another one."""
        await self._ask("claim", ticket=ticket, session=session, epoch=epoch, sequence=sequence)

    async def execute(
        self,
        attempt: str,
        digest: str,
        call: PythonCall | ShellCall,
        bound: Bound,
        *,
        cap: int,
        queued_at: float,
        session: str | None = None,
        on_event: OnEvent | None = None,
        acked: list[str] | None = None,
    ) -> Outcome:
        """Runs a call, joins it or fetches its kept result. `session`: what the receipt calls it, instead of what
        the agent does; the digest is then ours too. `acked`: as for `acknowledge`, in the same frame.

        Raises AttemptConflict, CallRefused, NoCapacity and, when its outcome did not come within the bound,
        ChannelLost.
        """
        request: dict[str, object] = {
            "t": "exec",
            "id": 0,
            "attempt": attempt,
            "digest": digest,
            "kind": "python" if isinstance(call, PythonCall) else "shell",
            "call": call.arguments(),
            "timeout": bound.timeout_s,
            "cap": min(cap, wire.MAX_CAP),
            "queued": queued_at,
        }
        if acked and self.hello.acks:
            request["acked"] = acked
        elif acked:
            self.acknowledge(acked)
        return await self._outcome(attempt, bound, on_event, request, session)

    async def attach(self, attempt: str, bound: Bound, on_event: OnEvent | None = None) -> Outcome:
        """Joins a running attempt or fetches a kept one. Raises AttemptUnknown, ChannelLost."""
        return await self._outcome(attempt, bound, on_event, {"t": "attach", "id": 0, "attempt": attempt})

    async def cancel(self, attempt: str, why: str) -> None:
        """Climbs the ladder; the outcome goes to who waits for it. `why`: "cancel" or "operator"."""
        await self._ask("cancel", attempt=attempt, why=why)

    def acknowledge(self, attempts: list[str]) -> None:
        """The agent may forget these results. Nobody waits for its answer."""
        if self._failure is None:
            frame = {"t": "ack", "id": next(self._ids), "attempts": attempts}
            self._channel.writer.write(wire.encode(frame))

    async def restart(self) -> int:
        """A new interpreter. Returns its epoch."""
        answer = await self._ask("restart")
        return self._checked(codec.count, answer, "epoch")

    async def status(self) -> codec.Fields:
        answer = await self._ask("status")
        return self._checked(codec.mapping, answer.get("status"), "status")

    async def epoch(self) -> int:
        """Of the interpreter that runs now."""
        return self._checked(codec.count, await self.status(), "epoch")

    async def stop(self) -> None:
        await self._ask("stop")

    async def list_files(self, path: str) -> tuple[list[codec.Fields], bool]:
        """Entries, and whether these are all: the agent cuts what is too long."""
        answer = await self._ask("files", deadline_s=60, op="list", path=path)
        found, complete = answer.get("files"), answer.get("complete")
        if not isinstance(found, list) or not isinstance(complete, bool):
            raise self._broke("files: not a list, or not said whether it is complete")
        return [self._checked(codec.mapping, item, "files") for item in found], complete

    async def put_file(self, path: str, upload: str, offset: int, piece: bytes, *, last: bool) -> int:
        """One piece of an upload. Returns the size so far."""
        frame = await self._ask(
            "files",
            deadline_s=60,
            op="put",
            path=path,
            upload=upload,
            offset=offset,
            piece=base64.b64encode(piece).decode(),
            last=last,
        )
        return self._checked(codec.count, frame, "size")

    async def remove_file(self, path: str) -> None:
        await self._ask("files", deadline_s=60, op="remove", path=path)

    async def get_file(self, path: str, limit: int, *, op: str = "get") -> AsyncIterator[bytes]:
        """The pieces of a file, or with `op="tar"` of an archive of a directory. Raises CallRefused over `limit`."""
        received = 0
        ident, waiter = self._send("files", op=op, path=path, limit=limit)
        try:
            while True:
                frame = await self._next(waiter, 60)
                if frame["t"] == "ok":
                    return
                if frame["t"] != "data":
                    raise self._broke("files: neither data nor an end")
                waiter.data.release()
                piece = self._checked(_read_piece, frame)
                received += len(piece)
                if received > limit:
                    raise self._broke("files: more than was asked for")
                yield piece
        finally:
            self._waiters.pop(ident, None)
            waiter.data.release()

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _ask(self, kind: str, /, deadline_s: float = REPLY_S, **fields: object) -> codec.Fields:
        ident, waiter = self._send(kind, **fields)
        try:
            frame = await self._next(waiter, deadline_s)
            if frame["t"] != "ok":
                raise self._broke(f"{frame['t']} in answer to {kind}")
            return frame
        finally:
            self._waiters.pop(ident, None)

    async def _outcome(
        self,
        attempt: str,
        bound: Bound,
        on_event: OnEvent | None,
        request: dict[str, object],
        session: str | None = None,
    ) -> Outcome:
        ident, line = self._line(request)
        waiter = self._waiters[ident] = _Execution(attempt, bound, on_event, self._late)
        try:
            self._channel.writer.write(line)
            frame = await waiter.end
        finally:
            waiter.close()
            self._waiters.pop(ident, None)
        if frame["t"] == "error":
            raise self._checked(_read_error, frame)
        digest = request.get("digest") if session is not None else None
        outcome = self._checked(codec.read_outcome, frame, session, digest)
        if outcome.receipt.attempt_id != attempt:
            raise self._broke("the result of another attempt")
        if on_event is not None and not waiter.started and outcome.receipt.started_at is not None:
            on_event(Started(attempt, outcome.receipt.epoch, outcome.receipt.sequence))  # it was too short to be told
        return outcome

    def _late(self, waiter: _Execution) -> None:
        if waiter.accepted and not waiter.started:
            waiter.asking = asyncio.create_task(self._ask_turn(waiter), name="agent-turn")
        else:
            self._stalled()

    async def _ask_turn(self, waiter: _Execution) -> None:
        """It has not started: as long as the agent answers, and another one runs, it waits its turn."""
        try:
            running = (await self.status()).get("running")
        except SandboxError as error:
            self._fail(error)
            return
        if waiter.started or running not in (None, waiter.attempt):
            waiter.wait_on(START_S)
        else:
            self._stalled()

    def _send(self, kind: str, /, **fields: object) -> tuple[int, _Waiter]:
        ident, line = self._line({"t": kind, "id": 0, **fields})
        waiter = self._waiters[ident] = _Waiter()
        self._channel.writer.write(line)
        return ident, waiter

    def _line(self, request: dict[str, object]) -> tuple[int, bytes]:
        """A request's new id and its line. Raises CallRefused, and what the connection died of."""
        if self._failure is not None:
            raise self._failure
        ident = request["id"] = next(self._ids)
        line = wire.encode(request)
        if len(line) > wire.MAX_FRAME_TO_AGENT:
            raise CallRefused(f"the call is larger than {wire.MAX_FRAME_TO_AGENT >> 20} MiB; send less")
        return ident, line

    async def _next(self, waiter: _Waiter, deadline_s: float) -> codec.Fields:
        """`_reply` with a deadline."""
        async with self._deadline(deadline_s):
            return await self._reply(waiter)

    @contextlib.asynccontextmanager
    async def _deadline(self, deadline_s: float) -> AsyncIterator[None]:
        """Raises ChannelStalled when it passes."""
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError:
            raise self._stalled() from None

    def _stalled(self) -> SandboxError:
        """It is open and does not answer: nobody else should wait for it either."""
        lost = ChannelStalled("transport lost: no answer in time; the result can be fetched again")
        self._fail(lost)
        return lost

    async def _reply(self, waiter: _Waiter) -> codec.Fields:
        """The next reply. Raises what the connection died of, or the agent's error."""
        if waiter.frames.empty() and self._failure is not None:
            raise self._failure
        frame = await waiter.frames.get()
        if isinstance(frame, SandboxError):
            raise frame
        if frame["t"] == "error":
            raise self._checked(_read_error, frame)
        return frame

    def _take(self, piece: bytes) -> bytes:
        """Takes what arrives while `_read` waits, and leaves it what it may have to wait with, and parts of frames."""
        if self._failure is not None or not self._lines.whole(piece):
            return piece
        try:
            lines = self._lines.feed(piece)
            for number, line in enumerate(lines):
                if self._dispatch(line) is not None:
                    return b"\n".join([*lines[number:], b""])
        except WireError as error:
            self._fail(error)
        except ValueError as error:
            self._fail(WireError(f"not of the protocol: {error}"))
        return b""

    def _dispatch(self, line: bytes) -> tuple[_Waiter, codec.Fields] | None:
        """Gives a frame to who waits for it. Returned is one that may have to wait until there is room for it.

        Raises WireError, ValueError.
        """
        frame = _decoded(line)
        ident = frame.get("id")
        waiter = self._waiters.get(ident) if type(ident) is int else None
        if waiter is None:
            if frame["t"] == "error" and ident in (0, None):
                raise WireError(f"the agent ended the connection: {_read_error(frame)}")
            return None
        if frame["t"] == "data" and isinstance(waiter, _Waiter):
            return waiter, frame
        waiter.take(frame)
        return None

    async def _read(self) -> None:
        reader = self._channel.reader
        try:
            lines = self._lines.rest()
            while True:
                for line in lines:
                    if (waits := self._dispatch(line)) is not None:
                        waiter, frame = waits
                        await waiter.data.acquire()
                        waiter.take(frame)
                piece = await reader.read(READ_BYTES)
                if not piece:
                    raise EOFError
                lines = self._lines.feed(piece)
        except WireError as error:
            self._fail(error)
        except ValueError as error:
            self._fail(WireError(f"not of the protocol: {error}"))
        except (OSError, EOFError):
            self._fail(ChannelLost("transport lost: the connection ended; the result can be fetched again"))

    def _fail(self, error: SandboxError) -> None:
        """The connection is over, for everybody. The first reason stays."""
        if self._failure is not None:
            return
        self._failure = error
        for waiter in self._waiters.values():
            waiter.fail(error)
        self._channel.writer.close()
        if self._on_lost is not None:
            self._on_lost()

    def _broke(self, what: str) -> WireError:
        error = WireError(f"the agent broke the protocol: {what}")
        self._fail(error)
        return error

    def _checked(self, read: Callable[..., _T], *values: Any) -> _T:
        try:
            return read(*values)
        except ValueError as error:
            raise self._broke(str(error)) from None


class _Lines:
    """Frames of a byte stream, at most MAX_FRAME_TO_HOST each, whatever the reader's own limit is."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._whole: list[bytes] = []
        self._part = bytearray()

    async def next(self) -> codec.Fields:
        """The next frame. Raises EOFError at the end, OSError, WireError."""
        while not self._whole:
            piece = await self._reader.read(READ_BYTES)
            if not piece:
                raise EOFError
            self._whole = self.feed(piece)
        return _decoded(self._whole.pop(0))

    def rest(self) -> list[bytes]:
        """What has come behind the last frame that `next` gave."""
        rest, self._whole = self._whole, []
        return rest

    def whole(self, piece: bytes) -> bool:
        """Whether it is whole frames and follows on such."""
        return not self._part and piece[-1:] == b"\n"

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that a piece completes. Raises WireError."""
        lines = piece.split(b"\n")
        part = lines.pop()
        if lines and self._part:
            lines[0] = bytes(self._part) + lines[0]
            self._part.clear()
        self._part += part
        if len(self._part) > wire.MAX_FRAME_TO_HOST or (lines and max(map(len, lines)) > wire.MAX_FRAME_TO_HOST):
            raise WireError("the agent sent a line that is too long")
        return [line for line in lines if line]  # empty ones mean nothing


def _decoded(line: bytes) -> codec.Fields:
    try:
        return wire.decode(line, wire.REPLIES)
    except wire.FrameError as error:
        raise WireError(f"the agent broke the protocol: {error}") from None


def _read_hello(frame: codec.Fields) -> Hello:
    if frame["t"] not in ("hello", "error"):
        raise WireError("the agent did not begin with hello")
    try:
        if frame["t"] == "error":
            raise _read_error(frame)
        if codec.count(frame, "v") != wire.VERSION:
            raise WireError(f"the agent speaks version {frame['v']!r}, this host {wire.VERSION}: restart the session")
        claim = frame.get("claim")
        if claim is not None:
            fields = codec.mapping(claim, "claim")
            claim = (codec.name(fields, "ticket"), codec.name(fields, "session"))
        kept = frame.get("kept")
        if not isinstance(kept, list) or len(kept) > codec.MAX_ITEMS * 10:
            raise ValueError("kept: not a list")
        return Hello(
            sandbox=codec.name(frame, "sandbox"),
            python=codec.name(frame, "python"),
            state=codec.name(frame, "state"),
            claim=claim,
            epoch=codec.count(frame, "epoch"),
            sequence=codec.count(frame, "sequence"),
            running=None if frame.get("running") is None else codec.name(frame, "running"),
            kept=tuple(codec.name({"kept": item}, "kept") for item in kept),
            acks=frame.get("acks") is True,
        )
    except ValueError as error:
        raise WireError(f"the agent's hello is wrong: {error}") from None


def _read_error(frame: codec.Fields) -> SandboxError:
    """The error of a frame. Raises ValueError when its code is not of the closed list."""
    code, message = codec.name(frame, "code"), codec.text(frame, "message")[:500]
    if code not in wire.ERRORS:
        raise ValueError("an unknown error code")
    match code:
        case "conflict":
            return AttemptConflict("this attempt id was used before with other arguments; nothing ran")
        case "unknown":
            return AttemptUnknown("the sandbox knows no such attempt")
        case "busy":
            return NoCapacity("too many calls of this session wait")
        case "bad_request":
            return CallRefused(message)
        case "not_found":
            return FileMissing(message)
        case "too_large":
            return FileTooLarge(message)
        case "claimed" | "unclaimed":
            return StateLost("another sandbox answers in this session's place")
        case "bad_frame" | "bad_version" | "refused":
            return WireError(f"the agent refused the connection: {message}")
        case _:
            return SandboxError(f"the agent failed: {message}")


def _read_started(attempt: str, frame: codec.Fields) -> Started:
    return Started(attempt, codec.count(frame, "epoch"), codec.count(frame, "sequence"))


def _read_piece(frame: codec.Fields) -> bytes:
    text = frame.get("piece")
    if not isinstance(text, str):
        raise ValueError("piece: not a text")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("piece: not base64") from None
