"""Runs Python executions in the sandbox's one interpreter, and starts a new one, a new epoch, when it dies.

Above: `executions`, `supervisor`. Below: `python_process`, `processes`.
"""

from __future__ import annotations

from time import time

from .memory import MemoryWatch
from .processes import Moment, unreaped
from .python_process import Interpreter
from .run import images
from .signals import signal
from .spawn import SpawnError
from .taking import Taking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .early import Early
    from .executions import Executions
    from .loop import Loop, Timer
    from .run import Run
    from .spawn import Spawner
    from .supervisor import Children

# From its start until it takes code: pre-imports are read from a cold disk, on a busy machine.
_START_S = 60.0
_CHANNEL_LOST = 70  # interpreter.EXIT_CHANNEL_LOST; that module is the interpreter's own
_OUTCOMES = {"ok": "ok", "exited": "ok", "raised": "raised", "interrupted": "raised"}


class Python:
    """The performer of kind "python"."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        spawner: Spawner,
        children: Children,
        executions: Executions,
        launcher: str,
        early: Early | None,
        end_rest: Callable[[], None],
        end_since: Callable[[Moment, int, set[tuple[int, int]]], list[int]],
    ) -> None:
        self._config = config
        self._loop = loop
        self._spawner = spawner
        self._children = children
        self._executions = executions
        self._launcher = launcher
        self._early = early
        self._end_rest = end_rest
        self._end_since = end_since
        self._began = Moment()
        self._ended_before: set[tuple[int, int]] = set()
        self._interpreter: Interpreter | None = None
        self._start_timer: Timer | None = None
        self._starting_output = b""
        self._run: Run | None = None
        self._was_ready = False
        self._preimports = config.preimports
        self._after_death: list[Callable[[], None]] = []
        self._lost: str | None = None  # why variables are gone, where no call has told it yet
        self._taking = Taking(loop, config.grace_s, self._occupied)
        self._memory = MemoryWatch(config.memory_bytes)
        self.version = ""

    # --- the interpreter's life

    @property
    def ready(self) -> bool:
        return self._interpreter is not None and self._interpreter.ready

    @property
    def pid(self) -> int | None:
        return None if self._interpreter is None else self._interpreter.pid

    def launch(self) -> None:
        """Starts an interpreter where there is none. Raises SpawnError."""
        if self._interpreter is not None:
            return
        self._starting_output = b""
        try:
            interpreter = Interpreter(
                self._config,
                self._loop,
                self._spawner,
                self._launcher,
                self._take_early(),
                self._preimports,
                self._ready,
                self._done,
                self._wrote,
            )
        except OSError as error:
            raise SpawnError(error.errno or 5, "the interpreter") from None
        self._interpreter = interpreter
        if self._was_ready:
            self._was_ready = False
            self._executions.epoch += 1
        self._start_timer = self._loop.after(_START_S, lambda: interpreter.signal(signal.SIGKILL))
        self._children.expect(interpreter.pid, lambda status, peak: self._died(interpreter, status, peak))

    def _take_early(self) -> Early | None:
        """The one that was started at the start, once, if it can become an interpreter of this configuration."""
        early, self._early = self._early, None
        if early is not None and not early.fits(self._config):
            early.dismiss()
            return None
        return early

    def restart(self, then: Callable[[], None]) -> None:
        """Kills the interpreter; its death starts the next, and then calls `then`."""
        if self._run is not None and self._run.started_at is not None and self._run.why is None:
            self._run.why = "operator"
        if self._interpreter is None:
            then()
            return
        self._after_death.append(then)
        self._kill()

    def _ready(self, _interpreter: Interpreter, version: str) -> None:
        self._loop.cancel(self._start_timer)
        self._was_ready = True
        self.version = version
        if self._starting_output:
            self._executions.background(self._starting_output)
            self._starting_output = b""
        if self._run is not None:
            self._begin(self._run)

    def _died(self, interpreter: Interpreter, status: int, peak_bytes: int) -> None:
        interpreter.doomed = True
        if not interpreter.condemned:
            interpreter.hear()  # what it has said last, or that it has not read all
        interpreter.output.drain()
        interpreter.close()
        self._loop.cancel(self._start_timer)
        self._end_rest()
        interpreter.output.drain()
        if interpreter is self._interpreter:
            self._interpreter = None
        if not interpreter.ready and not interpreter.condemned:
            # A file that these read at import, a settings file say, can be what keeps it from starting.
            self._preimports = []
        run, self._run = self._run, None
        untold = run is None or (run.started_at is None and interpreter.condemned)
        if untold and interpreter.used and not self._after_death:  # of a restart the host tells
            self._lost = _why_lost(interpreter, status, self._memory.exhausted(status, peak_bytes))
        if run is not None and untold:
            self._start_again(run)
        else:
            self._over(run, interpreter, status, peak_bytes)
        calls, self._after_death = self._after_death, []
        for call in calls:
            call()

    def _over(self, run: Run | None, interpreter: Interpreter, status: int, peak_bytes: int) -> None:
        if run is not None:
            self._end_of(run, interpreter, status, peak_bytes)
        if interpreter.ready or interpreter.condemned:
            self._relaunch()
        if run is not None:
            self._executions.ended(run)

    def _start_again(self, run: Run) -> None:
        """It was to run in an interpreter that had been killed already: in the next one, then."""
        try:
            self.start(run)
        except SpawnError as error:
            run.note(f"It could not be started: {error}.")
            self._executions.ended(run)

    def _relaunch(self) -> None:
        try:
            self.launch()
        except SpawnError:
            return  # the next execution tries again, and says what is wrong

    def _end_of(self, run: Run, interpreter: Interpreter, status: int, peak_bytes: int) -> None:
        if run.started_at is None:
            run.ending = "never_started"
            run.state = "lost"
            said = self._starting_output[-2000:].decode("utf-8", "replace").strip()
            run.note(f"The interpreter did not start ({_status(status)}).{' It said: ' + said if said else ''}")
        elif run.why is not None:
            run.stopped("lost")
        else:
            run.died(status, self._memory.exhausted(status, peak_bytes), "lost")
            _explain(run, interpreter, status)
        if not interpreter.ready:
            run.state = "lost"
            if run.started_at is None and interpreter.preimports:
                run.note("The next one starts without importing modules first.")

    # --- performing

    def start(self, run: Run) -> None:
        self._run = run
        if self._interpreter is None:
            try:
                self.launch()
            except SpawnError:
                self._run = None
                run.state = "lost"  # there is no interpreter that could keep it
                raise
        interpreter = self._interpreter
        if interpreter is None or not interpreter.ready or interpreter.condemned:
            return
        if interpreter.closed or interpreter.doomed:  # it has just died, and its death has not been seen yet
            interpreter.kill()
        else:
            self._begin(run)

    def rungs(self, run: Run) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
        return (lambda: self._interrupt(run, wide=False), lambda: self._interrupt(run, wide=True), self._kill)

    def catch_up(self) -> None:
        if self._interpreter is not None:
            self._interpreter.hear()
        self._children.reap()

    def pause(self, run: Run, paused: bool) -> None:
        if self._interpreter is not None and (run is self._run or not paused):
            self._interpreter.output.pause(paused)

    def _begin(self, run: Run) -> None:
        if self._interpreter is None:
            return
        self._interpreter.output.catch_up()  # of earlier cells' threads and children: background
        self._memory.note()
        self._began = Moment()
        self._executions.began(run)
        run.state_lost_before, self._lost = self._lost, None
        code = run.call.get("code")
        outputs = f"{self._config.data}/.outputs"
        text = code if isinstance(code, str) else ""
        self._interpreter.run(run.sequence, text, run.cap, outputs, self._executions.looked_at)
        self._taking.sent(self._interpreter)

    def _occupied(self, interpreter: Interpreter) -> None:
        """Its main thread runs what has been answered for, and no interrupt ends that."""
        interpreter.occupied = True
        interpreter.kill()

    def _interrupt(self, run: Run, *, wide: bool) -> None:
        """`wide`: also what it started, as a terminal would. Not at first: a server that an earlier cell started
        should outlive the interrupt, but `os.system` ignores interrupts for as long as its command runs."""
        interpreter = self._interpreter
        if interpreter is None or run is not self._run:
            return
        if run.started_at is None:
            self._run = None
            run.ending, run.state = "never_started", "kept"
            run.cause = {"kind": run.why, "rung": None, "signal": None, "exit_code": None, "limit": None}
            self._executions.ended(run)
            return
        if wide:
            interpreter.signal_group(signal.SIGINT)
        else:
            self._ended_before = unreaped(interpreter.pid, self._began)
            interpreter.signal(signal.SIGINT)
        interpreter.signal(signal.SIGCONT)  # last: what is stopped must not run on before the interrupt is there

    def _kill(self) -> None:
        if self._interpreter is not None:
            self._interpreter.kill()

    def _wrote(self, interpreter: Interpreter, data: bytes) -> None:
        if not interpreter.ready:
            self._starting_output = (self._starting_output + data)[-8192:]
        elif interpreter is self._interpreter:
            self._executions.wrote(data)
        else:
            self._executions.background(data)

    def _done(self, interpreter: Interpreter, frame: dict[str, object]) -> None:
        run = self._run
        outcome = _OUTCOMES.get(str(frame.get("outcome")))
        if interpreter is not self._interpreter or run is None or run.started_at is None:
            return
        number = frame.get("n")
        if isinstance(number, int) and number < run.sequence:
            run.note("Code of an earlier call had answered in its own place, and ran on until now.")
            return
        if number != run.sequence or outcome is None:
            interpreter.fail()
            return
        if run.why is not None and frame.get("untouched") is True:
            run.escaped()
        self._taking.answered(interpreter, max(0.0, run.timeout - (time() - run.started_at)))
        if run.why is not None:
            interpreter.reap(self._end_since(self._began, interpreter.pid, self._ended_before))
        interpreter.output.catch_up()
        self._run = None
        value, error = frame.get("value"), frame.get("error")
        run.value = value if isinstance(value, str) else None
        run.error = error if isinstance(error, str) else None
        if frame.get("images"):
            run.images = images(frame["images"], self._config.data)
        if frame.get("note"):
            run.note(frame["note"])
        self._executions.looked(run, frame.get("files"))
        if run.why is not None:
            run.stopped("kept")
        else:
            run.ending = outcome
        for note in self._memory.remarks(run):
            run.note(note)
        self._executions.ended(run)


def _explain(run: Run, interpreter: Interpreter, status: int) -> None:
    """An end that nobody would understand from a signal or an exit code."""
    if interpreter.occupied:
        run.ending = "never_started"
        run.note(
            "The interpreter was ended, because code of an earlier call had answered in its own place and did not stop."
            " The code of this call did not run; variables are lost."
        )
    elif interpreter.unread:
        run.ending = "never_started"
        run.note(
            f"The interpreter had ended ({_status(status)}) before it took the code of this call, which did not run;"
            " variables are lost."
        )
    elif interpreter.misused:
        run.note("The interpreter was ended, because something wrote to its control channel.")
    elif status >> 8 == _CHANNEL_LOST:
        run.note(
            f"The interpreter itself exits with code {_CHANNEL_LOST} when code closes its control channel,"
            " as os.closerange() over all descriptors does."
        )


def _why_lost(interpreter: Interpreter, status: int, out_of_memory: int | None) -> str:
    """Of an interpreter that ended between two calls."""
    if interpreter.occupied:
        why = "code that had answered in its own place ran on past its time, so the interpreter was ended"
    elif interpreter.misused:
        why = "something wrote to the interpreter's control channel, so it was ended"
    elif out_of_memory is not None:
        why = f"the interpreter ran out of memory (limit {out_of_memory / (1 << 20):.0f} MiB) after the previous call"
    elif status >> 8 == _CHANNEL_LOST:
        why = "after the previous call code closed the interpreter's control channel, and so ended it"
    else:
        why = f"the interpreter died after the previous call ({_status(status)})"
    return f"{why}; files are kept"


def _status(status: int) -> str:
    return f"signal {status & 0x7F}" if status & 0x7F else f"exit code {status >> 8}"
