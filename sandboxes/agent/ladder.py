"""Ends what runs: interrupt, grace, interrupt harder, grace, kill. Every climb ends in bounded time.

Above: `executions`. Below: `loop`. What each rung does is the performer's to say.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .loop import Loop, Timer

RUNGS = ("first_interrupt", "second_interrupt", "kill")


class Ladder:
    """`rungs` are what to do, in the order of RUNGS; `grace_s` is the time given to each before the next."""

    def __init__(self, loop: Loop, grace_s: float, rungs: Sequence[Callable[[], None]]) -> None:
        self._loop = loop
        self._grace_s = grace_s
        self._rungs = rungs
        self._timer: Timer | None = None
        self.reached = -1

    @property
    def rung(self) -> str | None:
        """The highest rung that was reached."""
        return RUNGS[self.reached] if self.reached >= 0 else None

    def climb(self) -> None:
        """Starts at the first rung; climbing already, it goes on as it was."""
        if self.reached < 0:
            self._step()

    def stop(self) -> None:
        """It has ended."""
        self._loop.cancel(self._timer)
        self._timer = None

    def _step(self) -> None:
        self.reached += 1
        if self.reached + 1 < len(self._rungs):
            self._timer = self._loop.after(self._grace_s, self._step)
        else:
            self._timer = None
        self._rungs[self.reached]()
