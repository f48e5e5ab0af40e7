"""Which files an execution made or changed: a worker that remembers what it saw the last time.

Above: `executions`. Below: `spawn`. It runs as the user's uid, and looks at names and times only.
"""

from __future__ import annotations

import os
from time import monotonic

from . import wire
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
_MAX_ENTRIES = 5000
_MAX_DEPTH = 6
_MAX_REPORTED = 50
_KINDS = frozenset({"changes"})


class Changes:
    """The agent's end. A worker that does not answer in time is replaced, and nothing is reported."""

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

    def prepare(self) -> None:
        """Starts the worker, so that it has seen what was there before."""
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
        """Calls `then` with [{path, size}] of what is new or other than at the last scan; within 0.25 s."""
        self._then = then
        if self._ask < 0:
            self.prepare()
            self._give([])
            return
        self._timer = self._loop.after(_ANSWER_S, self.discard)
        try:
            os.write(self._ask, b"?")
        except OSError:
            self.discard()

    def discard(self) -> None:
        """Ends the worker; the next scan starts another."""
        if self._ask >= 0:
            self._loop.forget(self._answers)
            os.close(self._ask)
            os.close(self._answers)
            self._ask = self._answers = -1
            self._children.kill(self._pid)
        self._give([])

    def _answered(self, _events: int) -> None:
        try:
            data = os.read(self._answers, 1 << 16)
        except BlockingIOError:
            return
        self._received += data
        if not data or len(self._received) > wire.MAX_FRAME_TO_HOST:
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
        self._give(files if isinstance(files, list) else [])

    def _give(self, files: list[dict[str, object]]) -> None:
        self._loop.cancel(self._timer)
        self._timer = None
        if self._then is not None:
            then, self._then = self._then, None
            then(files)


def _serve(data: str) -> None:
    """In the worker: one answer for each byte on descriptor 0, until its end."""
    seen = _Seen(data)
    seen.look()
    while os.read(0, 1):
        answer = wire.encode({"t": "changes", "files": seen.look()})
        view = memoryview(answer)
        while view:
            view = view[os.write(1, view) :]


class _Seen:
    """What was there at the last look: path -> (time of change, size, inode)."""

    def __init__(self, data: str) -> None:
        self._data = data
        self._files: dict[str, tuple[int, int, int]] = {}

    def look(self) -> list[dict[str, object]]:
        until = monotonic() + _SCAN_S
        now: dict[str, tuple[int, int, int]] = {}
        pending = [(self._data, 0)]
        complete = True
        while pending:
            if len(now) > _MAX_ENTRIES or monotonic() > until:
                complete = False
                break
            directory, depth = pending.pop()
            pending += [(below, depth + 1) for below in self._list(directory, now) if depth < _MAX_DEPTH]
        changed = [path for path, stamp in now.items() if self._files.get(path) != stamp]
        self._files = now if complete else {**self._files, **now}
        return [
            {"path": os.fsencode(path).decode("utf-8", "replace"), "size": now[path][1]}
            for path in changed[:_MAX_REPORTED]
        ]

    @staticmethod
    def _list(directory: str, into: dict[str, tuple[int, int, int]]) -> list[str]:
        """Adds the regular files of a directory; returns its directories. Hidden ones are not looked into."""
        below = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if not entry.name.startswith("."):
                            below.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        into[entry.path] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                    if len(into) > _MAX_ENTRIES:
                        break
        except OSError:
            return below
        return below
