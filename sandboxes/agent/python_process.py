"""One interpreter process as the agent sees it: a pid, a pipe of output, and a channel that is not to be believed.

Above: `executions`. Below: `spawn`, and the interpreter at the other end (`interpreter.py`).
"""

from __future__ import annotations

import _socket
import fcntl

from . import wire
from .loop import READ, WRITE
from .lower import expose_to_out_of_memory
from .pipes import Pipe
from .processes import send, send_group
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .early import Early
    from .loop import Loop
    from .spawn import Spawner

_KINDS = frozenset({"ready", "done"})
# A line of more than this is not from our interpreter: value, error and notes are capped there.
_LINE_BYTES = 4 << 20
_CHUNK = 1 << 16
_UNREAD = 0x5411  # <asm-generic/ioctls.h>: TIOCOUTQ. `termios`, which has it, takes 60 kB.


class Interpreter:
    """Started by the constructor; `on_ready(version)` follows, then `on_done(frame)` for each cell. When it says
    something senseless its channel is closed, and it ends. Raises SpawnError."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        spawner: Spawner,
        launcher: str,
        early: Early | None,
        preimports: list[str],
        on_ready: Callable[[Interpreter, str], None],
        on_done: Callable[[Interpreter, dict[str, object]], None],
        on_output: Callable[[Interpreter, bytes], None],
    ) -> None:
        self._loop = loop
        self._on_ready = on_ready
        self._on_done = on_done
        self.preimports = preimports
        self.misused = False
        self.occupied = False
        self.ready = False
        self.used = False
        """It has run a cell: its end loses variables."""
        self.unread = False
        """It has ended without reading all that it was sent, and so without running the cell that it was sent last."""
        self.doomed = False
        self.condemned = False
        """It was killed, and its death has not been seen yet: it is sent no more."""
        self._received = b""
        self._unsent = b""
        self._writing = False
        ours, theirs = _socket.socketpair()
        reader, writer = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        command = [
            config.python[0],
            *config.python[1:],
            "-I",
            "-B",
            launcher,
            "interpreter",
            "3",
            config.data,
            ":".join(config.site),
            ":".join(preimports),
        ]
        try:
            descriptors = [null, writer, writer, theirs.fileno()]
            if early is not None and early.send_off(config, spawner.rlimits, preimports, descriptors):
                self.pid = early.pid
                if not config.drops:
                    expose_to_out_of_memory(self.pid)
            else:
                self.pid = spawner.program(
                    command, descriptors=descriptors, environment=config.environment, directory=config.data
                )
        except BaseException:
            os.close(reader)
            ours.close()
            raise
        finally:
            os.close(null)
            os.close(writer)
            theirs.close()
        self._fd = ours.detach()
        os.set_blocking(self._fd, False)
        self.output = Pipe(loop, reader, lambda data: on_output(self, data))
        loop.watch(self._fd, READ, self._io)

    def run(self, number: int, code: str, cap: int, outputs: str, since: int) -> None:
        """Sends a cell; only when it is ready and runs none. `since`: for its look at changed files, nanoseconds."""
        self.used = True
        frame: dict[str, object] = {"t": "cell", "n": number, "code": code, "cap": cap, "outputs": outputs}
        self._unsent += wire.encode({**frame, "since": since})
        self._flush()

    def reap(self, pids: list[int]) -> None:
        """Tells it which of its children were killed: zombies count against the limit of processes, and only their
        parent can reap them."""
        if pids:
            self._unsent += wire.encode({"t": "reap", "pids": pids})
            self._flush()

    def probe(self) -> None:
        """Sends what it takes when it is idle, and does not answer."""
        if not self.untaken:
            self._unsent += wire.encode({"t": "reap", "pids": []})
            self._flush()

    @property
    def untaken(self) -> bool:
        """Whether it has not read all that it was sent."""
        if self._fd < 0:
            return False
        if self._unsent:
            return True
        left = bytearray(4)
        try:
            fcntl.ioctl(self._fd, _UNREAD, left)
        except OSError:  # a kernel that does not tell
            return False
        return any(left)

    def signal(self, number: int) -> None:
        if not self.doomed:
            send(self.pid, number)

    def signal_group(self, number: int) -> None:
        if not self.doomed:
            send_group(self.pid, number)

    def kill(self) -> None:
        """Ends it and its group."""
        self.condemned = True
        self.signal_group(9)
        self.signal(9)

    def close(self) -> None:
        """Closes the channel. The output pipe lives until its last writer is gone."""
        if self._fd >= 0:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _io(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ and self._fd >= 0:
            self._receive()

    def _flush(self) -> None:
        if self._fd < 0:
            return
        try:
            sent = os.write(self._fd, self._unsent[: 1 << 20])
        except BlockingIOError:
            sent = 0
        except OSError:
            self.unread = True
            self.close()
            return
        self._unsent = self._unsent[sent:]
        if bool(self._unsent) != self._writing:
            self._writing = not self._writing
            self._loop.watch(self._fd, READ | WRITE if self._writing else READ, self._io)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def hear(self) -> None:
        """Takes in what it has said already."""
        if self._fd >= 0:
            self._receive()

    def _receive(self) -> None:
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self.unread = isinstance(error, ConnectionResetError)
            data = b""
        if not data:
            self.close()
            return
        self._received += data
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            self._take(line)
        if len(self._received) > _LINE_BYTES:
            self.fail()

    def _take(self, line: bytes) -> None:
        try:
            frame = wire.decode(line, _KINDS)
        except wire.FrameError:
            self.fail()
            return
        if frame["t"] == "ready" and not self.ready:
            self.ready = True
            version = frame.get("python")
            self._on_ready(self, version[:40] if isinstance(version, str) else "")
        elif frame["t"] == "done" and self.ready:
            self._on_done(self, frame)

    def fail(self) -> None:
        """It is not our interpreter any more that speaks: end it; its death is then reported like any other."""
        self.misused = True
        self.condemned = self.ready  # one that talks nonsense at its start is no interpreter, and nor is the next
        self._received = b""
        self.close()
        self.signal(9)
