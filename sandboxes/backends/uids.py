"""A uid of its own for every running sandbox, from a range, also between hosts with different state directories.

Above: the bubblewrap backend, when it runs as root. Below: claim files in a directory that all hosts of a machine
share (`/run/toolhost/uids`: gone after a reboot, as the processes are).

A claim is a file `UID.SANDBOX` that names a process; it holds as long as that process lives. So nothing has to be
cleaned up for a host that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.backends.pidfd import Process
from sandboxes.errors import NoCapacity

# Above the ids of people and services (login.defs: up to 60000), below the ranges that subuid hands to people's
# containers by default and systemd's dynamic ones (524288 and up); 65536 of them.
FIRST = 200_000
COUNT = 65_536


@dataclass(frozen=True, slots=True)
class UidRange:
    first: int = FIRST
    count: int = COUNT

    def __contains__(self, uid: int) -> bool:
        return self.first <= uid < self.first + self.count


class Uids:
    """Claims of uids, kept in `directory`."""

    def __init__(self, directory: Path, uids: UidRange) -> None:
        self._directory = directory
        self._range = uids

    def make(self) -> None:
        """Raises OSError."""
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._directory.chmod(0o700)

    def claim(self, sandbox_id: str, holder: Process, preferred: int | None) -> int:
        """A uid that no living claim has, or `preferred`: a workspace's files stay with the uid that wrote them.

        Raises NoCapacity, OSError.
        """
        with self._locked():
            uid = preferred if preferred is not None else self._free(sandbox_id)
            self._write(uid, sandbox_id, holder)
            return uid

    def hold(self, uid: int, sandbox_id: str, holder: Process) -> None:
        """From now on the claim lives as long as `holder`. Raises OSError."""
        self._write(uid, sandbox_id, holder)

    def release(self, uid: int, sandbox_id: str) -> None:
        """Idempotent. Raises OSError."""
        (self._directory / f"{uid}.{sandbox_id}").unlink(missing_ok=True)

    def _free(self, sandbox_id: str) -> int:
        claims: dict[str, list[str]] = {}
        for name in os.listdir(self._directory):  # noqa: PTH208 - as many as there are sandboxes, at every start
            claims.setdefault(name.partition(".")[0], []).append(name)
        # Spread, so that a uid is not soon given to another sandbox.
        begin = zlib.crc32(sandbox_id.encode()) % self._range.count
        for step in range(self._range.count):
            uid = self._range.first + (begin + step) % self._range.count
            if not any(_living(self._directory / name) for name in claims.get(str(uid), ())):
                return uid
        raise NoCapacity(f"all {self._range.count} uids for sandboxes are in use; widen the range of uids")

    def _write(self, uid: int, sandbox_id: str, holder: Process) -> None:
        path = self._directory / f"{uid}.{sandbox_id}"
        aside = self._directory / f".{sandbox_id}"
        aside.write_text(json.dumps(holder.fields()))
        aside.replace(path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _living(path: Path) -> bool:
    """Whether the claim's process lives; a claim that does not hold is removed."""
    try:
        holder = Process(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        living = False
    else:
        living = holder.alive()
    if not living:
        path.unlink(missing_ok=True)
    return living
