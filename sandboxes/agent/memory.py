"""Whether something ran out of memory: from the cgroup where it can be seen, else from what the process had used.

Above: `python`, `shells`. Below: /sys/fs/cgroup, and wait4(2)'s usage.
"""

from __future__ import annotations

from .signals import signal
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .run import Run

_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
# A process is killed when the group reaches its limit, and others use a part of it.
_NEARLY = 0.8


class MemoryWatch:
    """`limit`: bytes, None where there is none."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._events = _open()
        self._kills = self._count()

    def note(self) -> None:
        """An execution starts: kills from here on are its own."""
        if self._kills is not None:
            self._kills = self._count()

    def exhausted(self, status: int, peak_bytes: int) -> int | None:
        """The limit, where a process that ended with `status` ran out of memory."""
        if self._limit is None:
            return None
        if self._killed():
            return self._limit
        if status & 0x7F in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT) and peak_bytes > self._limit * _NEARLY:
            return self._limit
        return None

    def remarks(self, run: Run) -> list[str]:
        """What an execution whose interpreter lives on should know."""
        if self._limit is None:
            return []
        size = f"{self._limit / (1 << 20):.0f} MiB"
        if self._killed():
            self.note()
            return [f"A process was killed because the sandbox ran out of memory (limit {size})."]
        if run.error is not None and run.error.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            return [f"The sandbox has {size} of memory."]
        return []

    def _killed(self) -> bool:
        if self._kills is None:
            return False
        now = self._count()
        return now is not None and now > self._kills

    def _count(self) -> int | None:
        if self._events is None:
            return None
        try:
            lines = os.pread(self._events, 4096, 0).split(b"\n")
        except OSError:
            return None
        for line in lines:
            name, _, count = line.partition(b" ")
            if name == b"oom_kill" and count.isdigit():
                return int(count)
        return None


def _open() -> int | None:
    """The counts of this control group, held open: they are read around every execution."""
    for path in _EVENTS:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return None
