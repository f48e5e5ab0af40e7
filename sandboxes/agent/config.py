"""What the backend tells the agent; the keys are listed in `wire`.

Above: `supervisor`. Below: the standard library. A missing or mistyped key ends the agent at once with a sentence on
stderr: it is a fault of the backend, not of a user.
"""

from __future__ import annotations

from . import wire
from .system import os


class ConfigError(ValueError):
    """The configuration lacks something, or something in it is of the wrong kind."""


class Config:
    """The configuration, checked. Sizes in bytes, times in seconds; None: not the agent's to enforce."""

    def __init__(self, given: dict[str, object]) -> None:
        self.sandbox = _text(given, "sandbox")
        self.owner = _text(given, "owner")
        self.nonce = _text(given, "nonce")
        if len(self.nonce) < 16:
            raise ConfigError("nonce is shorter than 16 characters")
        self.channel = _channel(given.get("channel"))
        self.peer_check = bool(given.get("peer_check", True))
        self.data = _text(given, "data")
        self.python = _texts(given, "python")
        if not self.python:
            raise ConfigError("python is empty")
        self.site = _texts(given, "site")
        self.uid = _whole(given, "uid")
        self.gid = _whole(given, "gid")
        self.environment = _environment(given.get("environment", {}))
        self.preimports = _texts(given, "preimports")
        limits = given.get("limits") or {}
        if not isinstance(limits, dict):
            raise ConfigError("limits is not an object")
        self.memory_bytes = _whole(limits, "memory_bytes")
        self.disk_bytes = _whole(limits, "disk_bytes")
        self.processes = _whole(limits, "processes")
        self.open_files = _whole(limits, "open_files")
        self.memory_rlimit = bool(limits.get("memory_rlimit", given.get("memory_rlimit", False)))
        self.filter = str(given.get("seccomp") or "")  # as it came, to be passed on
        self.seccomp = _bytes(given, "seccomp")
        self.timeout_s = _seconds(given, "timeout_s", 120.0)
        self.grace_s = _seconds(given, "grace_s", 2.0)
        fence = given.get("fence_s")
        self.fence_s = None if fence is None else _seconds(given, "fence_s", 0.0)

    @property
    def drops(self) -> bool:
        """User code runs as another uid than the agent."""
        return self.uid is not None and self.uid != os.getuid()

    @property
    def identity(self) -> list[int] | None:
        """Its uid and gid, if it does."""
        if self.uid is None or not self.drops:
            return None
        return [self.uid, self.uid if self.gid is None else self.gid]


def read(source: str) -> Config:
    """The configuration at `fd:N` (then closed), at `stdin` (its length as eight digits, then so many bytes: frames may
    follow), or in a file (then removed). Raises ConfigError, OSError."""
    if source == "stdin":
        return _from_stdin()
    if source.startswith("fd:"):
        descriptor = int(source[3:])
    else:
        descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        os.unlink(source)
    pieces = []
    while piece := os.read(descriptor, 1 << 16):
        pieces.append(piece)
    os.close(descriptor)
    return _parsed(b"".join(pieces))


def _from_stdin() -> Config:
    found = _parsed(_exactly(int(_exactly(8))))
    if found.channel["kind"] != "stdio":
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.close(null)
    return found


def _exactly(count: int) -> bytes:
    """So many bytes of stdin, and not one more."""
    taken = b""
    while len(taken) < count:
        piece = os.read(0, count - len(taken))
        if not piece:
            raise ConfigError("it is cut short")
        taken += piece
    return taken


def _parsed(text: bytes) -> Config:
    try:
        return Config(wire.parse(text))
    except wire.FrameError as error:
        raise ConfigError(str(error)) from None


def _text(given: dict[str, object], key: str) -> str:
    value = given.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key} is not a text")
    return value


def _texts(given: dict[str, object], key: str) -> list[str]:
    value = given.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{key} is not a list of texts")
    return value


def _whole(given: dict[str, object], key: str) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{key} is not a whole number")
    return value


def _bytes(given: dict[str, object], key: str) -> bytes:
    value = given.get(key) or ""
    if not isinstance(value, str):
        raise ConfigError(f"{key} is not a text")
    if not value:
        return b""
    import binascii

    try:
        return binascii.a2b_base64(value)
    except binascii.Error:
        raise ConfigError(f"{key} is not base64") from None


def _seconds(given: dict[str, object], key: str, default: float) -> float:
    value = given.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
        raise ConfigError(f"{key} is not a number of seconds")
    return float(value)


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ConfigError("environment is not an object of texts")
    return value


def _channel(value: object) -> dict[str, object]:
    if isinstance(value, dict):
        kind = value.get("kind")
        if (
            (kind == "listen_fd" and isinstance(value.get("fd"), int))
            or (kind == "listen_path" and isinstance(value.get("path"), str))
            or kind == "stdio"
        ):
            return value
    raise ConfigError("channel is none of listen_fd, listen_path, stdio")
