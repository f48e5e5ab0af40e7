"""Whether an interpreter takes what it is sent. One that does not runs something else: code that has written its own
answer runs on past it, without a deadline and in the way of the next cell.

Above: `python`. Below: `python_process`. The main thread is what counts: threads and children may go on for ever.
"""

from __future__ import annotations

from time import monotonic

from .signals import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .loop import Loop, Timer
    from .python_process import Interpreter

_LOOK_S = 0.5
# Tasks of earlier cells may keep the main thread for a while before it takes the next.
PATIENCE_S = 5.0


class Taking:
    """One look every half second while something is open, none once it was taken."""

    def __init__(self, loop: Loop, grace_s: float, kill: Callable[[Interpreter], None]) -> None:
        self._loop = loop
        self._grace_s = grace_s
        self._kill = kill
        self._interpreter: Interpreter | None = None
        self._until = 0.0
        self._ask = False
        self._interrupted = False
        self._timer: Timer | None = None

    def sent(self, interpreter: Interpreter) -> None:
        """A cell: it is to be taken soon."""
        self._interpreter = interpreter
        self._until = monotonic() + PATIENCE_S
        self._ask = self._interrupted = False
        if self._timer is None:
            self._timer = self._loop.after(_LOOK_S, self._look)

    def answered(self, interpreter: Interpreter, left_s: float) -> None:
        """It has answered its cell, and so has nothing to do: it takes a question before the cell's time is over."""
        self._interpreter = interpreter
        self._until = monotonic() + left_s
        self._ask = True
        self._interrupted = False
        if self._timer is None:
            self._timer = self._loop.after(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        interpreter = self._interpreter
        if interpreter is None or interpreter.doomed:
            return
        if self._ask:
            self._ask = False
            interpreter.probe()
        elif not interpreter.untaken:
            self._interpreter = None
            return
        elif monotonic() >= self._until and self._interrupted:
            self._interpreter = None
            self._kill(interpreter)
            return
        elif monotonic() >= self._until:
            self._interrupted = True
            self._until = monotonic() + self._grace_s
            interpreter.signal(signal.SIGINT)
            interpreter.signal(signal.SIGCONT)
        self._timer = self._loop.after(_LOOK_S, self._look)
