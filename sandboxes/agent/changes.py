"""Which files an execution made or changed: those whose inode changed between its beginning and the look at its end.

Above: `executions`, `python`. Below: `spawn`, `look`. An interpreter looks itself, after each cell, and tells. For a
command, and for an interpreter that did not live to tell, a worker looks, as the user's uid: it is started when the
execution begins, and ends when it has had nothing to do for a while.
"""

from __future__ import annotations

import select
import time

from . import wire
from .look import MAX_REPORTED, Look
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

_ANSWER_S = 0.25
_IDLE_S = 5.0
_LONGEST_PATH = 4096
_MAX_KNOWN = 1000
# The kernel dates files by its coarse clock (clock_gettime(2)), which never runs ahead of them: what changed before an
# execution began is not dated later. What was written in the same tick (4 ms, as a rule) cannot be told apart. gVisor's
# kernel has no coarse clock, and another than the host's, which dates.
_COARSE = 5
_SLACK_NS = 0 if time.clock_getres(_COARSE) > 1e-6 else 50_000_000
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
        self._put: dict[str, int] = {}  # by the host: path -> time of change
        self.since = 0
        self.begin()
        self._told: dict[object, object] = {}  # by the last look: another one's slack reaches back behind it

    def begin(self) -> None:
        """An execution begins: what has changed so far was not its doing. `since`: from when on to look, nanoseconds of
        the clock that dates files."""
        self.since = time.clock_gettime_ns(_COARSE) - _SLACK_NS
        if self._put:
            self._put = {path: at for path, at in self._put.items() if at >= self.since}

    def not_ours(self, stamp: object) -> None:
        """The host has put a file there, [path, time of change]: no execution's doing."""
        if isinstance(stamp, list) and len(stamp) == 2 and len(self._put) < _MAX_KNOWN:
            path, at = stamp
            if isinstance(path, str) and isinstance(at, int):
                self._put[path] = at

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

    def told(self, files: list[dict[str, object]]) -> list[dict[str, object]]:
        """[{path, size}] of what a look has found and neither the look before has told nor the host has put."""
        if not files:
            self._told = {}
            return []
        good = [file for file in files[:MAX_REPORTED] if self._is_file(file)]
        new = [file for file in good if self._told.get(file["path"]) != file["at"]]
        self._told = {file["path"]: file["at"] for file in good}
        return [
            {"path": file["path"], "size": file["size"]}
            for file in new
            if self._put.get(str(file["path"])) != file["at"]
        ]

    def _is_file(self, file: object) -> bool:
        """It may be user code that says so."""
        if not isinstance(file, dict):
            return False
        path, size, at = file.get("path"), file.get("size"), file.get("at")
        if not isinstance(path, str) or not isinstance(size, int) or not isinstance(at, int):
            return False
        return path.startswith(self._config.data + "/") and "\0" not in path and len(path) <= _LONGEST_PATH

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
            return self._ask >= 0 and os.write(self._ask, b"%d\n" % self.since) > 0
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
        self._give(self.told(files if isinstance(files, list) else []))

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
    look = Look(data)
    while poll.poll(int(_IDLE_S * 1000)) and (line := os.read(0, 64)):
        answer = wire.encode({"t": "changes", "files": _looked(look, int(line))})
        view = memoryview(answer)
        while view:
            view = view[os.write(1, view) :]


def _looked(look: Look, since: int) -> list[dict[str, object]]:
    try:
        return look.since(since)
    except OSError:
        return []
