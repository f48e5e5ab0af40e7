"""The reading end of a pipe that user code writes to, with back-pressure.

Above: `python_process`, `shells`. Below: `loop`.
"""

from __future__ import annotations

import fcntl

from .loop import READ
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .loop import Loop

_CAPACITY = 1 << 20
_CHUNK = 1 << 16  # a buffer of more is mapped and unmapped for every read

FIONREAD = 0x541B  # of termios, which is not worth loading
_waiting = bytearray(4)


class Pipe:
    """Hands on what arrives, at most `_CHUNK` bytes at a time, until the last writer is gone."""

    def __init__(self, loop: Loop, fd: int, take: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._take = take
        self._paused = False
        self.capacity = 1 << 16
        os.set_blocking(fd, False)
        try:
            self.capacity = fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _CAPACITY)
        except OSError:  # the kernel's limit for pipes of one user
            self.capacity = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
        loop.watch(fd, READ, self._ready)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def pause(self, paused: bool) -> None:
        """While paused nothing is read, and writers wait once the pipe is full."""
        if self.closed or paused == self._paused:
            return
        self._paused = paused
        if paused:
            self._loop.forget(self._fd)
        else:
            self._loop.watch(self._fd, READ, self._ready)

    def drain(self) -> None:
        """Takes what was written up to now, and not more: a writer may go on for ever."""
        left = self.capacity
        while left > 0 and not self.closed:
            got = self._read(min(left, _CHUNK))
            if not got:
                return
            left -= got

    def catch_up(self) -> None:
        """As `drain`, where its end is of no interest: an empty pipe is the usual case, and looked at for little."""
        if self._fd >= 0:
            try:
                fcntl.ioctl(self._fd, FIONREAD, _waiting)
            except OSError:  # a kernel that does not tell
                self.drain()
                return
            if any(_waiting):
                self.drain()

    def close(self) -> None:
        if not self.closed:
            if not self._paused:
                self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ready(self, _events: int) -> None:
        self._read(_CHUNK)

    def _read(self, size: int) -> int:
        try:
            data = os.read(self._fd, size)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        self._take(data)
        return len(data)
