"""The interpreter's end of its control channel: one JSON object a line over a stream socket.

Above it: `interpreter`, which reads cells from it and answers each. Below it: one inherited file descriptor. The
`json` package costs as much time as the rest of the start, so its C half is used directly where there is one.
"""

from __future__ import annotations

import fcntl
from fcntl import F_GETSIG, F_SETSIG
from fcntl import fcntl as control

from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Any
else:
    from .pristine import OS as os

globals()["__builtins__"] = BUILTINS

# Out of the way of loops that close "all" descriptors from 3 upwards; a lower limit on open files moves it down.
_HIGH_FD = 1000
_READ_BYTES = 1 << 16


# To know an open file again for a part of what fstat(2) and its result cost: which signal it would send if it were
# asked to (fcntl(2), F_SETSIG), which nobody does. SIGIO is what is sent anyway; the channel has another one's number.
PIPE_MARK = 29  # SIGIO
_CHANNEL_MARK = 23  # SIGURG


class ChannelClosed(Exception):
    """The supervisor is gone, or user code closed the channel: there is nobody left to answer."""


def raise_fd(fd: int) -> int:
    """Moves `fd` to a high number, close-on-exec, and returns that number. Raises OSError where no number is free."""
    floor = _HIGH_FD
    while True:
        try:
            moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)
            break
        except OSError:
            if floor < 16:
                raise
            floor //= 2
    os.close(fd)
    return moved


def mark(fd: int, number: int) -> None:
    """Marks the open file behind a descriptor, where the kernel can."""
    try:
        control(fd, F_SETSIG, number)
    except OSError:
        return


def marked(fd: int, number: int) -> bool:
    """Whether this is surely the marked file, or a copy of it; if not, it may be all the same."""
    try:
        return control(fd, F_GETSIG) == number
    except OSError:
        return False


class Channel:
    """Frames in and out. Not for use from several threads."""

    def __init__(self, fd: int) -> None:
        self.fd = raise_fd(fd)
        self._identity = self._stat()
        mark(self.fd, _CHANNEL_MARK)
        self._buffer = b""
        self._decode = _decoder()

    def _stat(self) -> tuple[int, int]:
        stat = os.fstat(self.fd)
        return stat.st_dev, stat.st_ino

    def has_line(self) -> bool:
        return b"\n" in self._buffer

    def read(self) -> bool:
        """Takes in what has arrived; blocks if nothing has. True when a whole line is there. Raises ChannelClosed."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        self._buffer += data
        return b"\n" in data

    def take(self) -> dict[str, Any]:
        """The next whole line as an object."""
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = self._decode(line.decode("utf-8"))
        return message

    def send(self, message: dict[str, Any]) -> None:
        """Writes one frame. Raises ChannelClosed; a descriptor that is no longer the channel counts as closed."""
        data = memoryview(encode(message).encode("ascii") + b"\n")
        try:
            if not marked(self.fd, _CHANNEL_MARK) and self._stat() != self._identity:
                raise ChannelClosed
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError as error:
            raise ChannelClosed from error

    def close(self) -> None:
        """Closes the descriptor, once: its number may be another file's by a second time."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _Context:
    strict = False
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def _decoder() -> Any:
    try:
        from _json import make_scanner
    except ImportError:  # an interpreter without the C half
        import json

        return json.loads
    scan = make_scanner(_Context())  # type: ignore[arg-type]
    return lambda text: scan(text, 0)[0]


def _encoder() -> Any:
    try:
        from _json import encode_basestring_ascii, make_encoder

        encoder = make_encoder(None, _unserializable, encode_basestring_ascii, None, ":", ",", False, False, False)
        "".join(encoder([], 0))
    except (ImportError, TypeError):
        import json

        return json.dumps
    return lambda value: "".join(encoder(value, 0))


def _unserializable(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is not JSON")


_encode = _encoder()


def encode(value: Any) -> str:
    """`value` (str, bool, int, None, and lists and dicts of these) as JSON in ASCII."""
    text: str = _encode(value)
    return text
