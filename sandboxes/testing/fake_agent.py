"""An agent that runs in this process and speaks the real wire. It keeps receipts and results as the real one does.

Variants: `mute` (it reads and never answers), `slow_s` (before each reply), `dies_on` (the sandbox ends when such a
request comes), `lies` (raw lines that are sent in place of the reply to the next execution).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sandboxes.agent import wire
from sandboxes.agent.files import MAX_LISTED
from sandboxes.codec import Fields
from sandboxes.spec import Cause, CauseKind, Ending, Outcome, Output, Receipt, Rung, State
from sandboxes.testing.fake_python import Died, FakePython

Send = Callable[[dict[str, object]], Awaitable[None]]


@dataclass(eq=False)
class Attempt:
    """One execution, while it waits, runs, and until it is acknowledged."""

    attempt: str
    digest: str
    kind: str
    call: Fields
    timeout: float
    cap: int
    queued: float
    sequence: int = 0
    started_at: float | None = None
    text: str = ""
    outcome: Outcome | None = None
    task: asyncio.Task[tuple[str | None, str | None]] | None = None
    why: Cause | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class FakeAgent:
    """One sandbox's agent. `on_end` is called when it stops itself or dies."""

    def __init__(self, sandbox: str, nonce: str, files: dict[str, bytes], on_end: Callable[[str], None]) -> None:
        self.sandbox = sandbox
        self.files = files
        self.mute = False
        self.ignored: list[str] = []  # the kinds of what it did not answer, in order
        self.slow_s = 0.0
        self.dies_on: str | None = None
        self.lies: list[bytes] = []
        self.executed: list[str] = []  # attempt ids whose code was run, in order: none may be there twice
        self.grace_s = 0.02
        self._over = False
        self._nonce = nonce
        self._on_end = on_end
        self._claim: tuple[str, str] | None = None
        self._epoch = 1
        self._sequence = 0
        self._python = FakePython(files)
        self._attempts: dict[str, Attempt] = {}
        self._queue: deque[Attempt] = deque()
        self._running: Attempt | None = None
        self._work = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = {asyncio.create_task(self._execute(), name="fake-agent")}

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers on a connection, until it ends."""
        if self._over:  # it died while the connection was made
            writer.close()
            return
        self._writers.add(writer)
        self._spawn(self._serve(reader, writer))

    def drop_connections(self) -> None:
        """What a broken transport looks like; the sandbox lives on."""
        for writer in list(self._writers):
            writer.close()

    async def end(self) -> None:
        """Ends everything of it."""
        self._over = True
        self.drop_connections()
        running = self._running
        for task in self._tasks:
            task.cancel()
        if running is not None and running.task is not None:
            running.task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def die(self, detail: str = "killed by signal 9") -> None:
        """As if PID 1 had been killed."""
        self._over = True
        self._on_end(detail)
        self.drop_connections()
        self._tasks_cancel()

    def _tasks_cancel(self) -> None:
        if self._running is not None and self._running.task is not None:
            self._running.task.cancel()
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- connections -------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lock = asyncio.Lock()

        async def send(frame: dict[str, object]) -> None:
            if self.slow_s:
                await asyncio.sleep(self.slow_s)
            async with lock:
                writer.write(wire.encode(frame))
                await writer.drain()

        try:
            hello = wire.decode(await reader.readline(), wire.REQUESTS)
            if hello.get("nonce") != self._nonce:
                await send({"t": "error", "id": 0, "code": "refused", "message": "wrong nonce"})
                return
            if not self.mute:
                await send(self._hello())
            while line := await reader.readline():
                frame = wire.decode(line, wire.REQUESTS)
                if self.mute:
                    self.ignored.append(str(frame["t"]))
                    continue
                self._spawn(self._answer(frame, send, writer))
        except (OSError, wire.FrameError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, frame: Fields, send: Send, writer: asyncio.StreamWriter) -> None:
        kind, ident = frame["t"], frame.get("id")

        async def reply(t: str, **fields: object) -> None:
            await send({"t": t, "id": ident, **fields})

        async def fail(code: str) -> None:
            await reply("error", code=code, message=f"{kind}: {code}")

        if self.dies_on == kind:
            self.die()
            return
        with contextlib.suppress(OSError):  # the connection went; what runs goes on
            await self._handle(str(kind), frame, reply, fail, writer)

    async def _handle(
        self,
        kind: str,
        frame: Fields,
        reply: Callable[..., Awaitable[None]],
        fail: Callable[[str], Awaitable[None]],
        writer: asyncio.StreamWriter,
    ) -> None:
        match kind:
            case "ping":
                await reply("ok")
            case "claim":
                await (reply("ok") if self._claimed(frame) else fail("claimed"))
            case "exec" if self.lies:
                ident = str(frame.get("id")).encode()
                writer.write(b"".join(line.replace(b"%ID%", ident) for line in self.lies))
                await writer.drain()
            case "exec":
                for attempt in frame.get("acked", ()):  # type: ignore[attr-defined]  # as for `ack`
                    self._attempts.pop(str(attempt), None)
                await self._exec(frame, reply, fail)
            case "attach":
                found = self._attempts.get(str(frame["attempt"]))
                await (self._follow(found, reply) if found else fail("unknown"))
            case "cancel":
                found = self._attempts.get(str(frame["attempt"]))
                if found is None:
                    await fail("unknown")
                else:
                    why = CauseKind.OPERATOR if frame.get("why") == "operator" else CauseKind.CANCEL
                    self._spawn(self._climb(found, Cause(why)))  # also where the answer reaches nobody
                    await reply("ok")
            case "ack":
                for attempt in frame["attempts"]:  # type: ignore[attr-defined]  # a list, as this test's host sends
                    self._attempts.pop(str(attempt), None)
                await reply("ok")
            case "restart":
                if (running := self._running) is not None:
                    await self._climb(running, Cause(CauseKind.OPERATOR), kill=True)
                    async with running.changed:
                        await running.changed.wait_for(lambda: running.outcome is not None)
                else:
                    self._new_epoch()
                await reply("ok", epoch=self._epoch)
            case "status":
                runs = self._current.attempt if self._current else None
                status = {"state": self._state(), "epoch": self._epoch, "sequence": self._sequence, "running": runs}
                await reply("ok", status=status)
            case "files":
                await self._files(frame, reply, fail)
            case "stop":
                await reply("ok")
                self.die("stopped")
            case _:
                await fail("bad_request")

    def _hello(self) -> dict[str, object]:
        claim = None if self._claim is None else {"ticket": self._claim[0], "session": self._claim[1]}
        return {
            "t": "hello",
            "id": 0,
            "v": wire.VERSION,
            "sandbox": self.sandbox,
            "python": "3.11.0",
            "state": self._state(),
            "claim": claim,
            "epoch": self._epoch,
            "sequence": self._sequence,
            "running": self._current.attempt if self._current else None,
            "kept": [a.attempt for a in self._attempts.values() if a.outcome is not None],
            "acks": True,
        }

    def _state(self) -> str:
        return "running" if self._current is not None else "idle"

    @property
    def _current(self) -> Attempt | None:
        """What runs, or is next to run where nothing does: that is only a round of the loop away from it."""
        return self._running or (self._queue[0] if self._queue else None)

    def _claimed(self, frame: Fields) -> bool:
        claim = (str(frame["ticket"]), str(frame["session"]))
        if self._claim is None:
            self._claim = claim
            self._epoch, self._sequence = _integer(frame["epoch"]), _integer(frame["sequence"])
        return self._claim == claim

    # --- executions --------------------------------------------------------------------------------------------------

    async def _exec(
        self, frame: Fields, reply: Callable[..., Awaitable[None]], fail: Callable[[str], Awaitable[None]]
    ) -> None:
        if self._claim is None:
            await fail("unclaimed")
            return
        ident = str(frame["attempt"])
        attempt = self._attempts.get(ident)
        if attempt is not None and attempt.digest != frame["digest"]:
            await fail("conflict")
            return
        if attempt is None:
            call = frame["call"]
            assert isinstance(call, dict)
            attempt = self._attempts[ident] = Attempt(
                attempt=ident,
                digest=str(frame["digest"]),
                kind=str(frame["kind"]),
                call=call,
                timeout=_number(frame["timeout"]),
                cap=_integer(frame["cap"]),
                queued=_number(frame["queued"]),
            )
            self._sequence += 1
            attempt.sequence = self._sequence
            self._queue.append(attempt)
            self._work.set()
        await self._follow(attempt, reply)

    async def _follow(self, attempt: Attempt, reply: Callable[..., Awaitable[None]]) -> None:
        await reply("accepted", sequence=attempt.sequence, epoch=self._epoch)
        async with attempt.changed:
            await attempt.changed.wait_for(lambda: attempt.started_at is not None or attempt.outcome is not None)
        if attempt.started_at is not None:
            await reply("started", sequence=attempt.sequence, epoch=self._epoch, at=attempt.started_at)
        sent = 0

        def news() -> bool:
            return len(attempt.text) > sent or attempt.outcome is not None

        while True:
            async with attempt.changed:
                await attempt.changed.wait_for(news)
            if len(attempt.text) > sent:
                text, sent = attempt.text[sent:], len(attempt.text)
                await reply("output", text=text[: wire.OUTPUT_PIECE])
            if attempt.outcome is not None:
                await reply("result", **dataclasses.asdict(attempt.outcome))
                return

    async def _execute(self) -> None:
        while True:
            while not self._queue:
                self._work.clear()
                await self._work.wait()
            attempt = self._queue.popleft()
            self._running = attempt
            attempt.started_at = time.time()
            self.executed.append(attempt.attempt)
            self._spawn(self._notify(attempt))
            outcome = await self._outcome(attempt, self._epoch)
            self._running = None
            attempt.outcome = outcome
            await self._notify(attempt)

    async def _outcome(self, attempt: Attempt, epoch: int) -> Outcome:
        def write(text: str) -> None:
            attempt.text += text
            self._spawn(self._notify(attempt))

        code = str(attempt.call.get("code", ""))
        attempt.task = asyncio.create_task(self._python.run(code, write), name="fake-cell")
        ending, state, value, error = Ending.OK, State.KEPT, None, None
        try:
            value, error = await asyncio.wait_for(asyncio.shield(attempt.task), attempt.timeout)
            ending = Ending.RAISED if error else Ending.OK
        except TimeoutError:
            await self._climb(attempt, Cause(CauseKind.DEADLINE, limit=attempt.timeout))
            ending = Ending.TIMED_OUT
        except Died as died:
            kind = CauseKind.SIGNAL if died.signal is not None else CauseKind.EXIT
            attempt.why = Cause(kind, signal=died.signal, exit_code=died.exit_code)
            ending = Ending.KILLED
        except asyncio.CancelledError:
            if self._over or not attempt.task.cancelled():
                raise
            ending = Ending.INTERRUPTED
        if ending is Ending.KILLED or (attempt.why is not None and attempt.why.rung is Rung.KILL):
            state = State.LOST
            self._new_epoch()
        return self._ended(attempt, epoch, ending, state, value, error)

    def _ended(
        self,
        attempt: Attempt,
        epoch: int,
        ending: Ending,
        state: State = State.KEPT,
        value: str | None = None,
        error: str | None = None,
    ) -> Outcome:
        session = self._claim[1] if self._claim else ""
        receipt = Receipt(
            session=session,
            epoch=epoch,
            sequence=attempt.sequence,
            attempt_id=attempt.attempt,
            digest=attempt.digest,
            queued_at=attempt.queued,
            started_at=attempt.started_at,
            ended_at=time.time(),
            ending=ending,
            state=state,
            bytes_out=len(attempt.text.encode()),
            cause=attempt.why,
        )
        half = attempt.cap // 2
        cut = max(len(attempt.text) - attempt.cap, 0)
        output = Output(attempt.text[:half], attempt.text[-half:], cut) if cut else Output(attempt.text)
        return Outcome(receipt, output, value=value, error=error)

    async def _climb(self, attempt: Attempt, cause: Cause, *, kill: bool = False) -> None:
        if attempt in self._queue:  # it waits, and ends at once
            self._queue.remove(attempt)
            attempt.why = cause
            attempt.outcome = self._ended(attempt, self._epoch, Ending.NEVER_STARTED)
            await self._notify(attempt)
            return
        if attempt.task is None or attempt.task.done() or attempt.why is not None:
            return
        rung = Rung.KILL if kill or self._python.ignores_interrupts else Rung.FIRST_INTERRUPT
        attempt.why = dataclasses.replace(cause, rung=rung)
        if rung is Rung.KILL and not kill:
            await asyncio.sleep(2 * self.grace_s)
        attempt.task.cancel()
        await asyncio.gather(attempt.task, return_exceptions=True)

    async def _notify(self, attempt: Attempt) -> None:
        async with attempt.changed:
            attempt.changed.notify_all()

    def _new_epoch(self) -> None:
        self._epoch += 1
        self._python = FakePython(self.files)

    # --- files -------------------------------------------------------------------------------------------------------

    async def _files(
        self, frame: Fields, reply: Callable[..., Awaitable[None]], fail: Callable[[str], Awaitable[None]]
    ) -> None:
        path = str(frame["path"])
        match frame["op"]:
            case "list":
                listed = [
                    {"path": name, "size": len(content), "modified": 0.0, "kind": "file"}
                    for name, content in sorted(self.files.items())
                    if not name.startswith(".uploads/")
                ]
                await reply("ok", files=listed[:MAX_LISTED], complete=len(listed) <= MAX_LISTED)
            case "get" if path not in self.files:
                await fail("not_found")
            case "get" if len(self.files[path]) > _integer(frame["limit"]):
                await fail("too_large")
            case "get":
                content = self.files[path]
                for at in range(0, len(content), wire.FILE_PIECE):
                    piece = base64.b64encode(content[at : at + wire.FILE_PIECE]).decode()
                    await reply("data", piece=piece)
                await reply("ok", size=len(content))
            case "put":
                aside = f".uploads/{frame['upload']}"
                held = self.files.get(aside, b"")[: _integer(frame["offset"])]
                self.files[aside] = held + base64.b64decode(str(frame["piece"]))
                size = len(self.files[aside])
                if frame["last"]:
                    self.files[path] = self.files.pop(aside)
                await reply("ok", size=size)
            case "remove" if path in self.files:
                del self.files[path]
                await reply("ok")
            case _:
                await fail("not_found")


def _integer(value: object) -> int:
    assert isinstance(value, int)
    return value


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
