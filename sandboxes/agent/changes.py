"""Which files an execution made or changed: those whose inode changed since the last look.

Above: `executions`, `python`. Below: `spawn`, `look`. An interpreter looks itself, after each cell, and tells. For a
command, and for an interpreter that did not live to tell, a worker looks, as the user's uid: it is started when the
execution begins, and ends when it has had nothing to do for a while.
"""

from __future__ import annotations

import os
import select
import time

from . import wire
from .look import MAX_REPORTED, Look
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
_IDLE_S = 5.0
_LONGEST_PATH = 4096
_KINDS = frozenset({"changes"})


class Changes:
    """The agent's end. A worker that does not answer in time is ended, and nothing is reported; the look after that
    goes as far back."""

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
        self.since = time.time_ns()
        self._asked = 0
        self._told: dict[object, object] = {}  # by the last look: another one's slack reaches back behind it

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

    def note_look(self, at: object) -> None:
        """Somebody else has looked for what changed since `since`, and began at this time (nanoseconds)."""
        if isinstance(at, int) and self.since < at <= time.time_ns():
            self.since = at

    def told(self, files: list[dict[str, object]]) -> list[dict[str, object]]:
        """[{path, size}] of what a look has found and the look before has not told."""
        good = [file for file in files[:MAX_REPORTED] if self._is_file(file)]
        new = [file for file in good if self._told.get(file["path"]) != file["at"]]
        self._told = {file["path"]: file["at"] for file in good}
        return [{"path": file["path"], "size": file["size"]} for file in new]

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
        """Calls `then` with [{path, size}] of what has changed since the last scan; within 0.25 s."""
        self._then = then
        self._asked = time.time_ns()
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
        self.since = self._asked
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


def _looked(look: Look, since_ns: int) -> list[dict[str, object]]:
    try:
        return look.since(since_ns)
    except OSError:
        return []
