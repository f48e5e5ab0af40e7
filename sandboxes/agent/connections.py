"""Connections of hosts: bytes in, frames out, and nobody who is slow delays anybody else.

Above: `requests` (what a frame means), `supervisor`. Below: `loop`, `wire`.
"""

from __future__ import annotations

import _socket
from _operator import _compare_digest
from time import monotonic

from . import wire
from .loop import READ, WRITE
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .loop import Loop, Timer

MAX_CONNECTIONS = 32
_HELLO_S = 10.0
_CHUNK = 1 << 16  # a buffer of more is mapped and unmapped for every read
# Beyond this a slow reader misses output frames, and file contents wait; results are never dropped.
BUSY_BYTES = 1 << 19
# Beyond this it is not slow but gone: it is cut off, and can come back for what is kept.
_GONE_BYTES = 64 << 20
_PEERCRED_BYTES = 12
_END = 10
# What only announces a result waits for it that long, to go with it: most executions are shorter, where many others run
# too, and to wake up and say it costs as much as a short one.
_LINGER_S = 0.05


class Connection:
    """One host's byte stream. `handle` gets each frame after the hello, `closed` its end, once."""

    def __init__(
        self,
        loop: Loop,
        source: int,
        sink: int,
        handle: Callable[[Connection, dict[str, object]], None],
        closed: Callable[[Connection], None],
        *,
        lasting: bool,
    ) -> None:
        self._loop = loop
        self._source = source
        self._sink = sink
        self._handle = handle
        self._closed = closed
        self._lasting = lasting
        self.greeted = False
        self.open = True
        self._received = bytearray()
        self._searched = 0
        self._unsent: list[bytes] = []
        self._first_sent = 0
        self.backlog = 0
        self._flush_due = False
        self._lingering: Timer | None = None
        self._before_flush: list[Callable[[], None]] = []
        self._announced: list[dict[str, object]] = []
        self._sink_watched = False
        self._ending = False
        self._for_room: list[Callable[[], None]] = []
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        loop.watch(source, READ, self._io)
        self._hello_timer = None if lasting else loop.after(_HELLO_S, self._too_late)

    # --- out

    def send(self, frame: dict[str, object]) -> None:
        if not self.open:
            return
        self._queue(wire.encode(frame))
        self._flush_soon()

    def send_line(self, line: bytes) -> None:
        """A frame that is encoded already."""
        if not self.open:
            return
        self._unsent.append(line)
        self.backlog += len(line)
        if self.backlog > _GONE_BYTES and not self._lasting:
            self._loop.soon(self.close)
        if not self._flush_due:
            self._flush_due = True
            self._loop.soon(self._flush)

    def announce(self, frame: dict[str, object]) -> None:
        """For what nobody waits for: goes with the next frame, or soon."""
        if self.open:
            self._announced.append(frame)
            self._linger()

    def linger(self, call: Callable[[], None]) -> None:
        """Calls it before the next frames are written, or soon, to queue frames of its own."""
        if not self.open:
            return
        self._before_flush.append(call)
        if self._lingering is None and not self._flush_due:
            self._lingering = self._loop.after(_LINGER_S, self._flush)

    def _linger(self) -> None:
        if self._lingering is None and not self._flush_due:
            self._lingering = self._loop.after(_LINGER_S, self._flush)

    def queue(self, frame: dict[str, object]) -> None:
        """For `linger`: the frame is written by who called."""
        if self.open:
            self._queue(wire.encode(frame))

    def send_if_room(self, frame: dict[str, object]) -> None:
        """For what may be missed."""
        if self.backlog < BUSY_BYTES:
            self.send(frame)

    def when_room(self, call: Callable[[], None]) -> None:
        """Calls it once everything is sent."""
        self._for_room.append(call)

    def end(self) -> None:
        """Closes once everything is sent. A lasting channel only forgets who spoke."""
        if self._lasting:
            self.greeted = False
            return
        self._ending = True
        self._flush_soon()

    def resynchronize(self) -> None:
        """A new host speaks on a lasting channel: what was meant for the one before is dropped, and an empty line ends
        what half a frame of it may have been sent."""
        if self._lasting:
            self._unsent, self._first_sent, self.backlog = [], 0, 0
            self._before_flush, self._announced = [], []
            self._queue(b"\n")
            self._flush_soon()

    def _queue(self, data: bytes) -> None:
        self._unsent.append(data)
        self.backlog += len(data)
        if self.backlog > _GONE_BYTES and not self._lasting:
            self._loop.soon(self.close)

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._lingering is not None:
            self._loop.cancel(self._lingering)
            self._lingering = None
        if not self.open:
            return
        if self._announced:
            announced, self._announced = self._announced, []
            for frame in announced:
                self._queue(wire.encode(frame))
        if self._before_flush:
            calls, self._before_flush = self._before_flush, []
            for call in calls:
                call()
        try:
            self._write()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if bool(self.backlog) != self._sink_watched:
            self._watch_sink(not self._sink_watched)
        if self.backlog:
            return
        if self._ending:
            self.close()
        elif self._for_room:
            waiting, self._for_room = self._for_room, []
            for call in waiting:
                self._loop.soon(call)

    def _write(self) -> None:
        while self._unsent:
            if len(self._unsent) > 1:
                self._unsent = [b"".join(self._unsent)]
            first = memoryview(self._unsent[0])[self._first_sent : self._first_sent + (1 << 20)]
            sent = os.write(self._sink, first)
            self.backlog -= sent
            self._first_sent += sent
            if self._first_sent == len(self._unsent[0]):
                self._unsent, self._first_sent = [], 0

    def _watch_sink(self, wanted: bool) -> None:
        self._sink_watched = wanted
        if self._sink == self._source:
            self._loop.watch(self._source, READ | WRITE if wanted else READ, self._io)
        elif wanted:
            self._loop.watch(self._sink, WRITE, self._io)
        else:
            self._loop.forget(self._sink)

    # --- in

    def _io(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if not events & READ or not self.open or self._ending:
            return
        try:
            data = os.read(self._source, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        if not self._received and data[-1] == _END and self.greeted:  # nearly always: whole frames
            for line in data.split(b"\n"):
                if line and self.open and not self._ending:
                    try:  # as `_take`
                        frame = wire.decode(line, wire.REQUESTS)
                    except wire.FrameError as error:
                        self._bad(str(error))
                    else:
                        self._handle(self, frame)
            return
        self._received += data
        while self.open and not self._ending:
            end = self._received.find(b"\n", self._searched)
            if end < 0:
                self._searched = len(self._received)
                break
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            self._searched = 0
            if line:
                self._take(line)
        if len(self._received) > (wire.MAX_FRAME_TO_AGENT if self.greeted or self._lasting else 4096):
            self._bad("a frame is too large")

    def _take(self, line: bytes) -> None:
        try:
            frame = wire.decode(line, wire.REQUESTS)
        except wire.FrameError as error:
            self._bad(str(error))
            return
        self._handle(self, frame)

    def _bad(self, why: str) -> None:
        self._received.clear()
        self._searched = 0
        self.send({"t": "error", "id": None, "code": "bad_frame", "message": why})
        if not self._lasting:  # there it may be the rest of a frame whose sender went away
            self.end()

    # --- its end

    def welcome(self) -> None:
        self.greeted = True
        self._loop.cancel(self._hello_timer)

    def _too_late(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._loop.cancel(self._hello_timer)
        self._loop.cancel(self._lingering)
        for fd in {self._source, self._sink}:
            self._loop.forget(fd)
            os.close(fd)
        self._received.clear()
        self._unsent = []
        self._before_flush, self._announced = [], []
        self._closed(self)


class Connections:
    """All of them, and where new ones come from. `refused(frame)` tells why a hello is not accepted."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        handle: Callable[[Connection, dict[str, object]], None],
        closed: Callable[[Connection], None],
    ) -> None:
        self._config = config
        self._loop = loop
        self._handle = handle
        self._on_closed = closed
        self._open: list[Connection] = []
        self._listener: _socket.socket | None = None
        self.last_host = monotonic()

    def start(self) -> None:
        """Raises OSError where the channel cannot be made."""
        kind = self._config.channel["kind"]
        if kind == "stdio":
            self._start_stdio()
            return
        listener = self._bound() if kind == "listen_path" else self._inherited()
        listener.setblocking(False)
        os.set_inheritable(listener.fileno(), False)
        self._listener = listener
        self._loop.watch(listener.fileno(), READ, self._accept)

    def greeted(self) -> bool:
        """Some host is connected that has shown the nonce."""
        return any(connection.greeted for connection in self._open)

    def refusal(self, frame: dict[str, object]) -> str | None:
        """The code of why this hello is refused; None: it is right."""
        if frame.get("v") != wire.VERSION:
            return "bad_version"
        nonce = frame.get("nonce")
        if not isinstance(nonce, str) or not _compare_digest(
            nonce.encode("utf-8", "replace"), self._config.nonce.encode()
        ):
            return "refused"
        return None

    def flush_all(self) -> None:
        """A last try before the agent ends."""
        for connection in list(self._open):
            connection._flush()

    def _inherited(self) -> _socket.socket:
        fd = self._config.channel["fd"]
        assert isinstance(fd, int)
        return _socket.socket(fileno=fd)

    def _bound(self) -> _socket.socket:
        path = self._config.channel["path"]
        assert isinstance(path, str)
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        umask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(umask)
        listener.listen(16)
        return listener

    def _start_stdio(self) -> None:
        """Frames on what were descriptors 0 and 1; these are /dev/null from here on."""
        import fcntl

        source = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 16)
        sink = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 16)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 0, inheritable=False)
        os.dup2(null, 1, inheritable=False)
        os.close(null)
        self._add(source, sink, lasting=True)

    def _accept(self, _events: int) -> None:
        assert self._listener is not None
        try:
            fd, _address = self._listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        os.set_inheritable(fd, False)
        peer = _socket.socket(fileno=fd)
        credentials = peer.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEERCRED_BYTES)
        peer.detach()
        foreign = int.from_bytes(credentials[:4], "little") == 0
        if (self._config.peer_check and not foreign) or len(self._open) >= MAX_CONNECTIONS:
            os.close(fd)
            return
        self._add(fd, fd, lasting=False)

    def _add(self, source: int, sink: int, *, lasting: bool) -> None:
        self._open.append(Connection(self._loop, source, sink, self._handle, self._gone, lasting=lasting))

    def _gone(self, connection: Connection) -> None:
        self._open.remove(connection)
        if connection.greeted:
            self.last_host = monotonic()
        self._on_closed(connection)
