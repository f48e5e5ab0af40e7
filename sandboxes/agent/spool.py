"""The whole of an output that had to be cut, on its way into a file: written by a worker as the user's uid.

Above: `executions`. Below: `spawn`, `files`. The agent itself may not write into the session's directory, and must not
wait for a disk.
"""

from __future__ import annotations

import os

from . import files
from .loop import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .loop import Loop, Timer
    from .spawn import Spawner

MAX_BYTES = 50 << 20
_CLOSING_S = 2.0
_HIGH_WATER = 4 << 20


class Spool:
    """Takes bytes, up to MAX_BYTES of them. `pause(True)` is called when its writer falls behind, `pause(False)` when
    it has caught up."""

    def __init__(
        self, loop: Loop, spawner: Spawner, data: str, sequence: int, limit: int, pause: Callable[[bool], None]
    ) -> None:
        self.path = f"{data}/.outputs/{sequence}.txt"
        self._loop = loop
        self._pause = pause
        self._room = limit
        self.complete = True
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._closing = False
        self._closed: Callable[[str | None], None] | None = None
        self._timer: Timer | None = None
        self._problem: str | None = None
        self._ended = False
        source, self._fd = os.pipe()
        self._said, report = os.pipe()
        try:
            self.pid = spawner.worker(lambda: files.save(data, sequence), [source, report])
        finally:
            os.close(source)
            os.close(report)
        os.set_blocking(self._fd, False)
        os.set_blocking(self._said, False)
        loop.watch(self._said, READ, self._reported)

    def add(self, data: bytes) -> None:
        if len(data) > self._room:
            data = data[: self._room]
            self.complete = False
        self._room -= len(data)
        if not data or self._fd < 0:
            return
        self._pending.append(data)
        self._pending_bytes += len(data)
        self._write(0)
        if self._pending_bytes > _HIGH_WATER:
            self._pause(True)

    def close(self, then: Callable[[str | None], None]) -> None:
        """Calls `then` with None once all is in the file, else with why not; within 2 s in any case."""
        if self._ended:
            then(self._problem)
            return
        self._closed = then
        self._closing = True
        self._timer = self._loop.after(_CLOSING_S, lambda: self._end("the disk was too slow"))
        self._write(0)

    def _write(self, _events: int) -> None:
        while self._pending and self._fd >= 0:
            try:
                sent = os.write(self._fd, self._pending[0])
            except BlockingIOError:
                break
            except OSError:  # the worker has given up; it said why
                self._drop()
                return
            self._pending_bytes -= sent
            rest = self._pending[0][sent:]
            if rest:
                self._pending[0] = rest
            else:
                del self._pending[0]
        if self._fd < 0:
            return
        if self._pending:
            self._loop.watch(self._fd, WRITE, self._write)
            return
        self._loop.forget(self._fd)
        self._pause(False)
        if self._closing:
            self._drop()

    def _drop(self) -> None:
        if self._fd >= 0:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._pending = []
        self._pending_bytes = 0
        self._pause(False)

    def _reported(self, _events: int) -> None:
        try:
            said = os.read(self._said, 200).decode("utf-8", "replace")
        except BlockingIOError:
            return
        self._end(None if said == "saved" else said or "its writer was killed")

    def _end(self, problem: str | None) -> None:
        self._drop()
        if self._said >= 0:
            self._loop.forget(self._said)
            os.close(self._said)
            self._said = -1
        self._problem = problem
        self._ended = True
        self._loop.cancel(self._timer)
        if self._closed is not None:
            then, self._closed = self._closed, None
            then(problem)
