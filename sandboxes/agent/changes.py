"""Which files an execution made or changed: those whose inode changed between its beginning and the look at its end.

Above: `executions`. Below: `spawn`. The worker that looks runs as the user's uid, looks at names and times only, is
started when an execution begins, and ends when it has had nothing to do for a while: an idle sandbox has none.
"""

from __future__ import annotations

import os
import select
import time
from time import monotonic

from . import wire
from .files import show
from .loop import READ
from .spawn import SpawnError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .loop import Loop, Timer
    from .spawn import Spawner
    from .supervisor import Children

_ANSWER_S = 0.25
_SCAN_S = 0.05
_IDLE_S = 5.0
# The kernel dates files by its coarse clock (clock_gettime(2)), which never runs ahead of them: what changed before an
# execution began is not dated later. What was written in the same tick (4 ms, as a rule) cannot be told apart. gVisor's
# kernel has no coarse clock, and another than the host's, which dates.
_COARSE = 5
_SLACK_NS = 0 if time.clock_getres(_COARSE) > 1e-6 else 50_000_000
_MAX_KNOWN = 1000
_MAX_ENTRIES = 5000
_MAX_DEPTH = 6
_MAX_REPORTED = 50
_KINDS = frozenset({"changes"})


class Changes:
    """The agent's end. A worker that does not answer in time is ended, and nothing is reported: a change that was not
    found with the execution that made it is not reported with a later one."""

    def __init__(self, config: Config, loop: Loop, spawner: Spawner, children: Children) -> None:
        self._config = config
        self._loop = loop
        self._spawner = spawner
        self._children = children
        self._ask = -1
        self._answers = -1
        self._pid = 0
        self._received = b""
        self._then: Callable[[list[dict[str, object]]], None] | None = None
        self._timer: Timer | None = None
        self._since = time.clock_gettime_ns(_COARSE)
        self._known: dict[str, tuple[int, int, int]] = {}

    def begin(self) -> None:
        """An execution begins: what has changed so far was not its doing. The worker starts while the code runs."""
        self._since = time.clock_gettime_ns(_COARSE)
        self._known = {path: stamp for path, stamp in self._known.items() if stamp[0] >= self._since - _SLACK_NS}
        self._loop.soon(self.prepare)

    def not_ours(self, stamp: object) -> None:
        """The host has put a file there, [path, time of change, size, inode]: no execution's doing."""
        if isinstance(stamp, list) and len(stamp) == 4 and len(self._known) < _MAX_KNOWN:
            path, *numbers = stamp
            if isinstance(path, str) and all(type(number) is int for number in numbers):
                self._known[path] = (numbers[0], numbers[1], numbers[2])

    def prepare(self) -> None:
        """Starts the worker where there is none."""
        if self._ask >= 0:
            return
        source, ask = os.pipe()
        answers, sink = os.pipe()
        data = self._config.data
        try:
            self._pid = self._spawner.worker(lambda: _serve(data), [source, sink])
        except SpawnError:
            os.close(ask)
            os.close(answers)
            return
        finally:
            os.close(source)
            os.close(sink)
        self._ask, self._answers = ask, answers
        os.set_blocking(ask, False)
        os.set_blocking(answers, False)
        self._received = b""
        self._loop.watch(answers, READ, self._answered)
        self._children.expect(self._pid, lambda _status, _peak: None)

    @property
    def pid(self) -> int | None:
        return self._pid if self._ask >= 0 else None

    def scan(self, then: Callable[[list[dict[str, object]]], None]) -> None:
        """Calls `then` with [{path, size}] of what has changed since `begin`; within 0.25 s."""
        self._then = then
        self._timer = self._loop.after(_ANSWER_S, self.discard)
        if not self._send():
            self._forget()  # it was just about to end
            if not self._send():
                self.discard()

    def _send(self) -> bool:
        self.prepare()
        try:
            return self._ask >= 0 and os.write(self._ask, b"%d\n" % self._since) > 0
        except OSError:
            return False

    def discard(self) -> None:
        """Ends the worker; the next execution starts another."""
        self._forget()
        self._give([])

    def _forget(self) -> None:
        if self._ask >= 0:
            self._loop.forget(self._answers)
            os.close(self._ask)
            os.close(self._answers)
            self._ask = self._answers = -1
            self._children.kill(self._pid)

    def _answered(self, _events: int) -> None:
        try:
            data = os.read(self._answers, 1 << 16)
        except BlockingIOError:
            return
        self._received += data
        if not data:
            self._ended()
            return
        if len(self._received) > wire.MAX_FRAME_TO_HOST:
            self.discard()
            return
        if not self._received.endswith(b"\n"):
            return
        line, self._received = self._received, b""
        try:
            files = wire.decode(line, _KINDS).get("files")
        except wire.FrameError:
            self.discard()
            return
        self._give(self._ours(files if isinstance(files, list) else []))

    def _ours(self, found: list[dict[str, object]]) -> list[dict[str, object]]:
        ours = []
        for file in found:
            path, size = file.get("path"), file.get("size")
            if self._known.get(str(path)) != (file.get("changed"), size, file.get("inode")):
                ours.append({"path": path, "size": size})
        return ours

    def _ended(self) -> None:
        """The worker had nothing to do, or user code killed it (it may: it has its uid)."""
        then, self._then = self._then, None
        self._loop.cancel(self._timer)
        self._forget()
        if then is not None:
            self._then = then
            self._timer = self._loop.after(_ANSWER_S, self.discard)
            if not self._send():
                self.discard()

    def _give(self, files: list[dict[str, object]]) -> None:
        self._loop.cancel(self._timer)
        self._timer = None
        if self._then is not None:
            then, self._then = self._then, None
            then(files)


def _serve(data: str) -> None:
    """In the worker: one answer for each line on descriptor 0, until its end, or until nobody has asked for long."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    look = _Look(data)
    while poll.poll(int(_IDLE_S * 1000)) and (line := os.read(0, 64)):
        answer = wire.encode({"t": "changes", "files": look.since(int(line))})
        view = memoryview(answer)
        while view:
            view = view[os.write(1, view) :]


class _Look:
    """Finds what changed, and does not report the same change twice: path -> (time of change, size, inode)."""

    def __init__(self, data: str) -> None:
        self._data = data
        self._told: dict[str, tuple[int, int, int]] = {}

    def since(self, then_ns: int) -> list[dict[str, object]]:
        """Not by the time of modification, which programs set as they like, but by that of the inode's change."""
        until = monotonic() + _SCAN_S
        after = then_ns - _SLACK_NS
        now: dict[str, tuple[int, int, int]] = {}
        pending = [(self._data, 0)]
        seen = 0
        while pending and seen <= _MAX_ENTRIES and monotonic() < until:
            directory, depth = pending.pop()
            below, count = self._list(directory, after, now)
            seen += count
            pending += [(path, depth + 1) for path in below if depth < _MAX_DEPTH]
        changed = [path for path, stamp in now.items() if self._told.get(path) != stamp]
        self._told = now
        return [
            {"path": show(path), "changed": now[path][0], "size": now[path][1], "inode": now[path][2]}
            for path in changed[:_MAX_REPORTED]
        ]

    @staticmethod
    def _list(directory: str, after: int, into: dict[str, tuple[int, int, int]]) -> tuple[list[str], int]:
        """Adds the regular files of a directory that changed; returns its directories, and how much was in it. Hidden
        ones are not looked into."""
        below = []
        count = 0
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    count += 1
                    if count > _MAX_ENTRIES:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        if not entry.name.startswith("."):
                            below.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        if stat.st_ctime_ns >= after:
                            into[entry.path] = (stat.st_ctime_ns, stat.st_size, stat.st_ino)
        except OSError:
            return below, count
        return below, count
