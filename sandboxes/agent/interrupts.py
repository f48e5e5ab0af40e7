"""SIGINT: what it does, and when.

User code is interruptible only inside `with interrupts:`; everywhere else, between cells too, the signal is ignored.
A cell that waits in the event loop is cancelled; anything else gets KeyboardInterrupt.

SIGHUP ends nothing: gVisor's kernel sends it to the interpreter's whole process group when one member of it dies while
others are stopped, as they are while the agent ends what a cell has started.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # `signal` costs 3 ms: it builds enums

from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

globals()["__builtins__"] = BUILTINS

SIGINT = int(_signal.SIGINT)
SIGHUP = int(_signal.SIGHUP)


def hung_up(number: int, frame: FrameType | None) -> None:
    """A handler and not SIG_IGN, which programs that user code starts would inherit."""


class Interrupts:
    """The one handler of SIGINT, put back before every cell."""

    def __init__(self) -> None:
        self.armed = False
        """Set directly only where a call would be seen by a trace function of the user's."""
        self.landed = False
        """Whether an interrupt has reached user code since the cell began."""
        self.cancel: Callable[[FrameType | None], bool] | None = None
        """Set while a cell runs in the event loop: cancels it (sets `landed`), or lets one that has ended be. False:
        that was not possible. Told which frame was interrupted."""
        self.idle: Callable[[FrameType | None], bool] | None = None
        """Set while only background tasks run: whether one of them is keeping the next cell waiting."""
        self._own = self._handle  # one object, to know it again without asking what user code installed
        _signal.signal(SIGHUP, hung_up)
        self.install()

    def install(self) -> None:
        """Takes SIGINT back, whatever user code set it to, and unblocks it."""
        _signal.signal(SIGINT, self._own)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [SIGINT])

    @property
    def untouched(self) -> bool:
        """No interrupt has reached the cell. False too where its own handler may have seen one."""
        return not self.landed and _signal.getsignal(SIGINT) is self._own

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            if self.cancel is None or not self.cancel(frame):
                self.landed = True
                raise KeyboardInterrupt
        elif self.idle is not None and self.idle(frame):
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self.armed = True

    def __exit__(self, *details: object) -> None:
        self.armed = False
