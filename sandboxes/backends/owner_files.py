"""One file a sandbox that says whose it is and how to find its processes, and a lock for each key.

Above: the bubblewrap backend. Below: the file system. Everything is below `ROOT/sandboxes/KEY/`, a directory of mode
0700 that nothing inside a sandbox can see.

Files are replaced, never written in place, and not flushed to disk: after a power loss nothing that they name runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sandboxes.backends.pidfd import Process
from sandboxes.errors import EngineUnavailable
from sandboxes.spec import Handle

OWNER_FILE = "owner.json"
LOCK_PAUSE_S = 0.01
NAME = re.compile(r"[a-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one sandbox. `init` is its PID 1 as this machine sees it; None while it is being started, by
    `launcher`. `group` names its control group, "" without one."""

    handle: Handle
    owner: str
    uid: int
    group: str
    launcher: Process
    init: Process | None = None

    def running(self) -> bool:
        return self.init is not None and self.init.alive()

    def starting(self) -> bool:
        """Some thread or process is still at it."""
        return self.init is None and self.launcher.alive()

    def started(self, init: Process) -> Record:
        """The same with its PID 1, which is also what tells this instance from another."""
        handle = replace(self.handle, instance=f"{init.boot[:8]}-{init.pid}-{init.started}")
        return replace(self, handle=handle, init=init)

    def encode(self) -> str:
        return json.dumps(
            {
                "handle": _fields(self.handle),
                "owner": self.owner,
                "uid": self.uid,
                "group": self.group,
                "launcher": self.launcher.fields(),
                "init": None if self.init is None else self.init.fields(),
            }
        )

    @classmethod
    def decode(cls, text: str) -> Record:
        """Raises ValueError, also for a file of another version."""
        try:
            fields = json.loads(text)
            init = fields.pop("init")
            return cls(
                handle=Handle(**fields.pop("handle")),
                launcher=Process(**fields.pop("launcher")),
                init=None if init is None else Process(**init),
                **fields,
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not an owner file: {error}") from None


def _fields(handle: Handle) -> dict[str, object]:
    """`dataclasses.asdict` takes long to find that there is nothing below."""
    return {name: getattr(handle, name) for name in handle.__dataclass_fields__}


def checked(name: str) -> str:
    """The same, when it is a key or a workspace's name as the contract has them: it becomes a file name.

    Raises ValueError.
    """
    if not NAME.fullmatch(name) or set(name) == {"."}:
        raise ValueError(f"not 1 to 64 of a-z 0-9 . _ -: {name[:80]!r}")
    return name


class OwnerFiles:
    """The owner files below one directory."""

    def __init__(self, root: Path) -> None:
        self.sandboxes = root / "sandboxes"
        self._locks = root / "locks"

    def make(self) -> None:
        """Raises OSError."""
        for directory in (self.sandboxes, self._locks):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def directory(self, key: str) -> Path:
        return self.sandboxes / checked(key)

    def write(self, record: Record) -> None:
        """Makes the sandbox's directory if need be. Raises OSError."""
        directory = self.directory(record.handle.key)
        directory.mkdir(mode=0o700, exist_ok=True)
        aside = directory / f"{OWNER_FILE}.{secrets.token_hex(4)}"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(record.encode())
            aside.replace(directory / OWNER_FILE)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def read(self, key: str) -> Record | None:
        """None when there is none, or when it cannot be understood: it then names nothing that runs."""
        try:
            return Record.decode((self.directory(key) / OWNER_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def all(self) -> list[Record]:
        """Every record, of every owner. Raises OSError."""
        found = [self.read(path.name) for path in sorted(self.sandboxes.iterdir())]
        return [record for record in found if record is not None]

    def remove(self, key: str) -> None:
        """Removes the sandbox's directory and all in it: only the host writes there. Idempotent. Raises OSError."""
        directory = self.directory(key)
        with contextlib.suppress(FileNotFoundError):
            # The owner file goes last: what is left of an interrupted removal is still found.
            for path in sorted(directory.iterdir(), key=lambda path: path.name == OWNER_FILE):
                path.unlink(missing_ok=True)
            directory.rmdir()

    def sweep_locks(self) -> None:
        """Removes those that nobody holds: a host was killed while it did."""
        for path in self._locks.iterdir():
            with contextlib.suppress(EngineUnavailable), self.locked(path.name, 0):
                pass

    @contextlib.contextmanager
    def locked(self, name: str, timeout_s: float) -> Iterator[None]:
        """Holds the lock of a key against every thread and process. Raises EngineUnavailable after `timeout_s`."""
        path = self._locks / checked(name)
        descriptor = _lock(path, time.monotonic() + timeout_s)
        try:
            yield
        finally:
            # Removed while it is held: who waits for it sees that the name is another file now, and begins anew.
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _lock(path: Path, deadline: float) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise EngineUnavailable(f"another host process holds the lock {path} for too long; try again")
        time.sleep(LOCK_PAUSE_S)
