"""Executions: accepted in order, run one at a time, each with one result that is kept until the host has it.

Above: `requests` (submit, attach, cancel, acknowledge, restart). Below: the performers `python` and `shells`, which
run code and tell how it ended; `ladder`, `spool` and `changes`.
"""

from __future__ import annotations

import time

from .attempts import Attempts
from .ladder import Ladder
from .output import Capture
from .spawn import SpawnError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from .config import Config
    from .connections import Connection
    from .loop import Loop
    from .run import Run
    from .spawn import Spawner
    from .spool import Spool

    class Waiter(Protocol):
        """Who asked for an attempt: one request on one connection."""

        connection: Connection

        def announce(self, run: Run) -> None: ...

        def send_line(self, line: bytes) -> None: ...

        def send_output(self, text: str) -> None: ...

    class Performer(Protocol):
        """Runs one kind of execution."""

        def start(self, run: Run) -> None:
            """Starts it, now or when it can; then calls `began`, and in the end `ended`. Raises SpawnError."""

        def rungs(self, run: Run) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
            """What the ladder does to it."""

        def catch_up(self) -> None:
            """Takes in what its processes have said already, their ends too."""

        def pause(self, run: Run, paused: bool) -> None:
            """Lets what it writes wait, or no longer."""

    class Watcher(Protocol):
        """Finds what files an execution made or changed, or is told."""

        since: int

        def told(self, files: list[dict[str, object]]) -> list[dict[str, object]]: ...

        def begin(self) -> None:
            """An execution begins; sets `since`."""

        def prepare(self) -> None:
            """A scan will follow."""

        def scan(self, then: Callable[[list[dict[str, object]]], None]) -> None: ...


MAX_WAITING = 64
_BACKGROUND_CHARACTERS = 4000


class Executions:
    """The queue, the one that runs, and what has ended. `watcher` is asked after each; `on_begin` and `on_end`
    are told of each that starts."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        spawner: Spawner,
        watcher: Watcher,
    ) -> None:
        self._config = config
        self._loop = loop
        self._spawner = spawner
        self._watcher = watcher
        self.performers: dict[str, Performer] = {}
        self.attempts = Attempts()
        self.session = ""
        self.sequence = 0
        self.epoch = 0
        self.current: Run | None = None
        self._finishing = False
        self._waiting: list[Run] = []
        self._waiters: dict[str, list[Waiter]] = {}
        self._background = Capture(_BACKGROUND_CHARACTERS)
        self.on_begin: Callable[[], None] = _nothing
        self.on_end: Callable[[], None] = _nothing

    # --- what the host asks for

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def worker_pids(self) -> list[int]:
        """Of the worker that writes the outputs file, if there is one."""
        spool = self.current.spool if self.current is not None else None
        return [] if spool is None else [spool.pid]

    @property
    def full(self) -> bool:
        """No more can be taken in."""
        return len(self._waiting) >= MAX_WAITING or self.attempts.full

    def submit(self, run: Run, waiter: Waiter) -> None:
        """Takes in a new execution; it runs when its turn comes."""
        self.sequence += 1
        run.sequence = self.sequence
        run.epoch = self.epoch
        self.attempts.add(run)
        self._waiting.append(run)
        self.join(run, waiter)
        if self.current is None:
            self._next()

    def join(self, run: Run, waiter: Waiter) -> None:
        """Sends `waiter` what is known of `run`, and later the rest."""
        result = self.attempts.result(run.attempt)
        if result is not None:
            waiter.send_line(result)
            return
        waiter.announce(run)
        self._waiters.setdefault(run.attempt, []).append(waiter)

    def leave(self, connection: Connection) -> None:
        """A connection has ended: nobody listens there any more. What runs goes on."""
        for attempt in list(self._waiters):
            left = [waiter for waiter in self._waiters[attempt] if waiter.connection is not connection]
            if left:
                self._waiters[attempt] = left
            else:
                del self._waiters[attempt]

    def cancel(self, run: Run, why: str) -> None:
        """Ends it by the ladder; one that waits ends at once; of one that has ended nothing changes."""
        if run is self.current:
            if not self._finishing:
                self._climb(run, why)
        elif run in self._waiting:
            self._waiting.remove(run)
            run.why = why
            run.ending, run.cause = "never_started", _cause(why)
            self._publish(run, None)

    def stop_current(self, why: str, note: str) -> None:
        """The agent's own reason to end what runs (a limit). Nothing runs: nothing happens."""
        run = self.current
        if run is not None and not self._finishing and run.why is None:
            run.why_note = note
            self._climb(run, why)

    def note_all_ended(self) -> None:
        """Every process of user code had to be killed."""
        if self.current is not None:
            self.current.note("Processes multiplied too fast to be told apart: all were killed, shells and jobs too.")

    # --- what performers tell

    @property
    def looked_at(self) -> int:
        """From when on to look for changed files, nanoseconds."""
        return self._watcher.since

    def looked(self, run: Run, files: object) -> None:
        """Whoever runs it has looked for changed files itself; None: it could not."""
        if isinstance(files, list):
            run.files, run.looked = files, True

    def began(self, run: Run) -> None:
        """Its code starts now: from here its time counts."""
        run.started_at = time.time()
        run.epoch = self.epoch
        self.on_begin()
        run.deadline = self._loop.after(run.timeout, lambda: self._climb(run, "deadline"))
        for waiter in self._waiters.get(run.attempt, ()):
            waiter.announce(run)
        if run.kind == "python":
            self._watcher.begin()  # its code is sent now, and it looks itself
        else:
            self._loop.soon(self._watcher.prepare)

    def wrote(self, data: bytes) -> None:
        """Output of user code: of the running execution, else of what earlier ones left behind."""
        run = self.current
        if run is None or self._finishing or run.started_at is None:
            self.background(data)
            return
        text = run.capture.add(data)
        if text and run.streamed < run.cap:
            text = text[: run.cap - run.streamed]
            run.streamed += len(text)
            for waiter in self._waiters.get(run.attempt, ()):
                waiter.send_output(text)

    def background(self, data: bytes) -> None:
        self._background.add(data)

    def ended(self, run: Run) -> None:
        """It is over, and `run` says how. Its result follows as soon as its files are known."""
        if run is not self.current or self._finishing:
            return
        self._finishing = True
        self._loop.cancel(run.deadline)
        run.deadline = None  # it knows the run: what ended goes at once, and its memory is taken again while it is warm
        if run.ladder is not None:
            run.ladder.stop()
        run.ended_at = time.time()
        run.capture.finish()
        if run.spool is not None:
            spool = run.spool
            spool.close(lambda problem: self._saved(run, spool, problem))
        else:
            self._find_files(run)

    # --- the life of a run

    def _next(self) -> None:
        if not self._waiting:
            return
        run = self.current = self._waiting.pop(0)
        self._finishing = False
        run.capture = Capture(run.cap, lambda data: self._spill(run, data))
        performer = self.performers[run.kind]
        if run.kind != "python":
            self._watcher.begin()  # a command runs before `began` is called
        try:
            performer.start(run)
        except SpawnError as error:
            run.note(f"It could not be started: {error}.")
            run.ending = "never_started"
            self.ended(run)

    def _climb(self, run: Run, why: str) -> None:
        if run.why is None:
            # On a busy machine its end and the deadline may be due in the same round: the end came first.
            self.performers[run.kind].catch_up()
            if run is not self.current or self._finishing:
                return
            run.why = why
        if run.ladder is None:
            run.ladder = Ladder(self._loop, self._config.grace_s, self.performers[run.kind].rungs(run))
        run.ladder.climb()

    def _spill(self, run: Run, data: bytes) -> Callable[[bytes], None]:
        from . import spool  # few sessions need it, and every one would hold it

        limit = (
            spool.MAX_BYTES if self._config.disk_bytes is None else min(spool.MAX_BYTES, self._config.disk_bytes // 8)
        )
        performer = self.performers[run.kind]
        try:
            run.spool = spool.Spool(
                self._loop,
                self._spawner,
                self._config.data,
                run.sequence,
                limit,
                lambda paused: performer.pause(run, paused),
            )
        except (SpawnError, OSError):
            run.note("The whole output could not be saved: its writer could not be started.")
            return lambda _data: None
        run.spool.add(data)
        return run.spool.add

    def _saved(self, run: Run, spool: Spool, problem: str | None) -> None:
        if problem is None:
            run.file, run.file_complete = spool.path, spool.complete
        else:
            run.note(f"The whole output could not be saved: {problem}.")
        self._find_files(run)

    def _find_files(self, run: Run) -> None:
        def found(files: list[dict[str, object]]) -> None:
            run.files = files
            self._close(run)

        if run.started_at is None:
            found([])
        elif run.looked:
            run.files = self._watcher.told(run.files)
            self._close(run)
        else:
            self._watcher.scan(found)

    def _close(self, run: Run) -> None:
        background = None
        if self._background.bytes_out:
            self._background.finish()
            background = self._background.frame()
            self._background = Capture(_BACKGROUND_CHARACTERS)
        self.current = None
        self._finishing = False
        self._publish(run, background)
        self._loop.soon(self.on_end)  # once the result is on its way
        if self._waiting:
            self._next()

    def _publish(self, run: Run, background: dict[str, object] | None) -> None:
        result = run.result(self.session, background)
        self.attempts.finish(run, result)
        for waiter in self._waiters.pop(run.attempt, ()):
            waiter.send_line(result)


def _nothing() -> None:
    """Nobody wants to know."""


def _cause(kind: str) -> dict[str, object]:
    return {"kind": kind, "rung": None, "signal": None, "exit_code": None, "limit": None}
