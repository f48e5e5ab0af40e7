"""The host's file requests: each is done by a worker of its own as the user's uid, whose frames are passed on.

Above: `requests`. Below: `files` (in the worker), `spawn`, `connections`. A host that reads slowly makes the
worker wait.
"""

from __future__ import annotations

from . import wire
from .connections import BUSY_BYTES, Connection
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

_MAX_WORKERS = 8
_MAX_WAITING = 256
_LONGEST_S = 600.0
_REPLIES = frozenset({"ok", "data", "error"})


class Transfers:
    """What runs, and what waits: at most 8 at a time, in order of arrival, pieces of one upload one after another.
    `on_put` is told the stamp of each file that was put."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        spawner: Spawner,
        children: Children,
        on_put: Callable[[object], None],
    ) -> None:
        self._on_put = on_put
        self._config = config
        self._loop = loop
        self._spawner = spawner
        self._children = children
        self._running: list[_Transfer] = []
        self._waiting: list[_Transfer] = []

    @property
    def pids(self) -> list[int]:
        return [transfer.pid for transfer in self._running]

    def begin(self, connection: Connection, ident: object, frame: dict[str, object]) -> None:
        transfer = _Transfer(connection, ident, frame)
        if len(self._waiting) >= _MAX_WAITING:
            transfer.refuse("busy", "too many file requests wait")
            return
        self._waiting.append(transfer)
        self._more()

    def leave(self, connection: Connection) -> None:
        """Nobody waits for these any more."""
        self._waiting = [transfer for transfer in self._waiting if transfer.connection is not connection]
        for transfer in [transfer for transfer in self._running if transfer.connection is connection]:
            self._finish(transfer)

    def _more(self) -> None:
        for transfer in list(self._waiting):
            if len(self._running) >= _MAX_WORKERS:
                return
            if any(transfer.upload is not None and other.upload == transfer.upload for other in self._running):
                continue
            self._waiting.remove(transfer)
            self._start(transfer)

    def _start(self, transfer: _Transfer) -> None:
        from . import files  # here: not every session has any use for it

        source, sink = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        data, frame = self._config.data, transfer.frame
        try:
            transfer.pid = self._spawner.worker(lambda: files.serve(data, frame), [null, sink])
        except SpawnError as error:
            os.close(source)
            transfer.refuse("failed", str(error))
            return
        finally:
            os.close(null)
            os.close(sink)
        transfer.frame = {}
        os.set_blocking(source, False)
        transfer.source = source
        self._running.append(transfer)
        self._children.expect(transfer.pid, lambda _status, _peak: None)
        transfer.timer = self._loop.after(_LONGEST_S, lambda: self._give_up(transfer))
        self._loop.watch(source, READ, lambda _events: self._read(transfer))

    def _read(self, transfer: _Transfer) -> None:
        try:
            data = os.read(transfer.source, 1 << 18)
        except BlockingIOError:
            return
        if data:
            self._pass_on(transfer, data)
        if transfer in self._running and (not data or len(transfer.received) > wire.MAX_FRAME_TO_HOST):
            transfer.refuse("failed", "the file worker was ended")
            self._finish(transfer)
        elif transfer in self._running and transfer.connection.backlog > BUSY_BYTES:
            self._wait_for_room(transfer)

    def _pass_on(self, transfer: _Transfer, data: bytes) -> None:
        *lines, transfer.received = (transfer.received + data).split(b"\n")
        for line in lines:
            try:
                reply = wire.decode(line, _REPLIES)
            except wire.FrameError:
                transfer.refuse("failed", "the file worker was ended")
                self._finish(transfer)
                return
            if "stamp" in reply:
                self._on_put(reply.pop("stamp"))
            transfer.reply(reply)
            if reply["t"] != "data":
                self._finish(transfer)
                return

    def _wait_for_room(self, transfer: _Transfer) -> None:
        self._loop.forget(transfer.source)

        def resume() -> None:
            if transfer in self._running:
                self._loop.watch(transfer.source, READ, lambda _events: self._read(transfer))

        transfer.connection.when_room(resume)

    def _give_up(self, transfer: _Transfer) -> None:
        transfer.refuse("failed", f"not done within {_LONGEST_S:.0f} s")
        self._finish(transfer)

    def _finish(self, transfer: _Transfer) -> None:
        if transfer not in self._running:
            return
        self._running.remove(transfer)
        self._loop.cancel(transfer.timer)
        self._loop.forget(transfer.source)
        os.close(transfer.source)
        self._children.kill(transfer.pid)
        self._loop.soon(self._more)


class _Transfer:
    """One file request."""

    def __init__(self, connection: Connection, ident: object, frame: dict[str, object]) -> None:
        self.connection = connection
        self._ident = ident
        self.frame = frame
        upload = frame.get("upload") if frame.get("op") == "put" else None
        self.upload = upload if isinstance(upload, str) else None
        self.pid = 0
        self.source = -1
        self.received = b""
        self.timer: Timer | None = None

    def reply(self, frame: dict[str, object]) -> None:
        self.connection.send({**frame, "id": self._ident})

    def refuse(self, code: str, message: str) -> None:
        self.reply({"t": "error", "code": code, "message": message})
