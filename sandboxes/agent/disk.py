"""The watch over how much the session's directory holds. A worker counts as the user's uid; the agent only compares.

Above: `supervisor`. Below: `spawn`, statvfs(3). A quota of the file system is better where the backend has one: this
one notices within about half a second of an execution's time. To count costs as much as many short executions.
"""

from __future__ import annotations

from time import monotonic

from .loop import READ
from .spawn import SpawnError
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .loop import Loop, Timer
    from .spawn import Spawner
    from .supervisor import Children

_EVERY_S = 0.5
_EVERY_WHEN_FULL_S = 0.1
# What may be added while over the limit before the next execution is stopped too: deleting needs some room itself.
_SLACK = 4 << 20
_COUNT_S = 10.0
# Names cost something as well, whatever is in the files: inodes of the file system, which all sessions share, and the
# time to remove them.
_ENTRY_BYTES = 1024
BYTES_A_NAME = 16 << 10  # of the limit


class DiskWatch:
    """Counts only when the file system's free space has changed. `over(used, names)` is called when an execution has
    grown the directory past the limit."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        spawner: Spawner,
        children: Children,
        running: Callable[[], bool],
        over: Callable[[int, int], None],
    ) -> None:
        self._data = config.data
        self._limit = config.disk_bytes
        self._loop = loop
        self._spawner = spawner
        self._children = children
        self._running = running
        self._over = over
        self._free = (-1, -1)  # blocks and inodes, when it was last counted
        self._block = 1
        self._counted_ever = False
        self._first: Timer | None = None
        self._used = 0
        self._allowed = 0
        # Executions that have ended, now and when the count under way began: one from before tells nothing of where
        # the next execution starts from, and what only deletes must not be stopped for what the one before wrote.
        self._ended = 0
        self._counting = 0
        self._known = 0
        self._began = 0.0
        self._timer: Timer | None = None
        self._source = -1
        self.pid: int | None = None

    def begin(self) -> None:
        """An execution starts."""
        if self._limit is None:
            return
        self._began = monotonic()
        if self._known == self._ended:
            if self._used <= self._limit:
                self._allowed = self._limit
            else:
                self._allow(self._limit)
        elif self.pid is None:
            self._count()
        if self._free[0] < 0:
            self._changed()
        if self._timer is None:
            self._again()

    def end(self) -> None:
        """An execution has ended: what it left is where the next one starts from. Free space changes all the time where
        others write too; that alone is no reason to count, or each execution would start a worker."""
        if self._limit is None:
            return
        self._ended += 1
        if self.pid is not None:
            return  # what is counted now is from before this end
        if self._may_be_over(self._limit):
            self._count()
            return
        self._known = self._ended  # it may be a little off, but the limit is far
        if not self._counted_ever and self._first is None:
            # A session that has just begun has something better to do than to start a worker.
            self._first = self._loop.after(_EVERY_S, self._count_first)

    def _count_first(self) -> None:
        self._first = None
        if self.pid is None and not self._counted_ever:
            self._changed()
            self._count()

    def _may_be_over(self, limit: int) -> bool:
        """Whether all that was written to the file system since the last count would take it past the limit, or past
        what it held when it was past it already."""
        try:
            found = os.statvfs(self._data)
        except OSError:
            return False
        if self._used > limit:
            return self._changed()
        free = found.f_bfree, found.f_ffree
        written = (self._free[0] - free[0]) * self._block
        made = (self._free[1] - free[1]) * BYTES_A_NAME
        if self._used + max(written, made) <= limit - _SLACK:
            return False
        self._free = free
        return True

    def _allow(self, limit: int) -> None:
        self._allowed = max(limit, self._used + _SLACK if self._used > limit else 0)

    def _again(self) -> None:
        full = self._limit is not None and self._used > self._limit
        self._timer = self._loop.after(_EVERY_WHEN_FULL_S if full else _EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._running():
            return
        young_s = self._began + _EVERY_S - monotonic()
        if young_s > 0 and self._used <= self._allowed:  # what it may do until it ends, its end looks at
            self._timer = self._loop.after(young_s, self._look)
            return
        if self.pid is None and self._changed():
            self._count()
        self._again()

    def _changed(self) -> bool:
        try:
            found = os.statvfs(self._data)
        except OSError:
            return False
        free, self._block = (found.f_bfree, found.f_ffree), found.f_frsize
        changed, self._free = free != self._free, free
        return changed

    def _count(self) -> None:
        source, sink = os.pipe()
        data = self._data
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid = self._spawner.worker(lambda: _say_used(data), [null, sink])
        except SpawnError:
            os.close(source)
            return
        finally:
            os.close(null)
            os.close(sink)
        self.pid, self._source = pid, source
        self._counting = self._ended
        self._changed()  # what is written from here on may be missing in what it finds
        os.set_blocking(source, False)
        self._loop.watch(source, READ, self._counted)
        timer = self._loop.after(_COUNT_S, lambda: self._children.kill(pid))
        self._children.expect(pid, lambda _status, _peak: self._loop.cancel(timer))

    def _counted(self, _events: int) -> None:
        try:
            said = os.read(self._source, 64)
        except BlockingIOError:
            return
        self._loop.forget(self._source)
        os.close(self._source)
        self.pid = None
        numbers = said.split()
        if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
            self._free = (-1, -1)
            return
        used, names = int(numbers[0]), int(numbers[1])
        self._used = max(used, names * BYTES_A_NAME)
        self._counted_ever = True
        assert self._limit is not None
        if self._known != self._ended:
            # Where short executions follow each other some have always ended meanwhile: counted again after each, the
            # watch would cost more than they do.
            if self._counting != self._ended and self._may_be_over(self._limit):
                self._count()
                return
            self._known = self._ended
            self._allow(self._limit)
        elif self._running() and self._used > self._allowed:
            self._over(used, names)


def _say_used(data: str) -> None:
    """In the worker."""
    os.nice(5)
    os.write(1, b"%d %d" % used(data))


def used(data: str) -> tuple[int, int]:
    """Bytes on disk below `data`, and names. Links are counted, not followed; the bytes of a file with several names
    are counted once."""
    total = names = 0
    seen: set[tuple[int, int]] = set()
    pending = [data]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    names += 1
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if info.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                        if (info.st_dev, info.st_ino) in seen:
                            continue
                        seen.add((info.st_dev, info.st_ino))
                    total += _ENTRY_BYTES + info.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:
            continue
    return total, names
