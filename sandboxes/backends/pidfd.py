"""A process named so that a recycled pid is never mistaken for it: pid, start time and boot.

Above: the bubblewrap backend. Below: `/proc` and the kernel's pidfds (Linux >= 5.3).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@cache
def boot_id() -> str:
    """What changes with every boot of this machine. Pids and start times mean something only together with it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid` (proc(5), stat field 22); None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name and may contain blanks and brackets: count from the last bracket.
    return int(text[text.rindex(b")") + 2 :].split()[19])


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one boot."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now. Raises ProcessLookupError."""
        started = start_time(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, started, boot_id())

    def fields(self) -> dict[str, object]:
        """Of which it can be made again."""
        return {"pid": self.pid, "started": self.started, "boot": self.boot}

    @contextlib.contextmanager
    def opened(self) -> Iterator[int | None]:
        """A pidfd of exactly this process, or None when it is gone (a zombie counts as gone)."""
        descriptor = self._open()
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def alive(self) -> bool:
        with self.opened() as descriptor:
            return descriptor is not None

    def kill(self, timeout_s: float) -> bool:
        """Sends SIGKILL and waits. True when it is gone; of a pid namespace's PID 1, everything in it is gone too."""
        with self.opened() as descriptor:
            if descriptor is None:
                return True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return ended(descriptor, timeout_s)

    def _open(self) -> int | None:
        if self.boot != boot_id():
            return None
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        # The start time is read while the pidfd is held: as long as that process has not ended, the pid is its own.
        if start_time(self.pid) == self.started and not ended(descriptor, 0):
            return descriptor
        os.close(descriptor)
        return None


def ended(descriptor: int, timeout_s: float) -> bool:
    """Waits until the process of a pidfd has ended. False after `timeout_s` seconds."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
