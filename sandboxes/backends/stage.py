"""Host directories under paths that an unprivileged uid can reach, seen by nobody but the launching threads.

Above: the bubblewrap backend, when it runs as root: bubblewrap is started as the session's uid, which can walk neither
into the state directory (0700) nor into what root has installed below `/root`. Below: mount namespaces.

Each thread that launches gets a mount namespace of its own (they belong to threads, and what a thread starts begins in
its namespace). There, below one directory, lie bind mounts of what sandboxes need. Bubblewrap copies the namespace when
it starts, so a workspace is mounted only until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000
MS_NOSUID_NODEV = 0x2 | 0x4
MNT_DETACH = 0x2
SLOT = "workspace"
IN_MEMORY = ("tmp", "shm")


class Stage:
    """The bind mounts: `fixed` ones (name → host path) for all launches, and during each launch one more, and
    directories in memory: bubblewrap's own have a size, and no limit of names."""

    def __init__(self, directory: Path, fixed: Mapping[str, Path]) -> None:
        self._directory = directory
        self._fixed = dict(fixed)
        self._thread = threading.local()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def make(self) -> None:
        """Raises OSError."""
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        for directory in (self._directory, self._directory.parent):
            directory.chmod(0o755)

    def path(self, name: str) -> Path:
        """Where a mounted thing is, for a process that one of the launching threads starts."""
        return self._directory / name

    def enter(self) -> None:
        """Gives the calling thread its namespace, once. Raises OSError (EPERM without CAP_SYS_ADMIN)."""
        if getattr(self._thread, "entered", False):
            return
        self._check(self._libc.unshare(CLONE_NEWNS), "unshare")
        # What is mounted on the host later still appears here; what is mounted here never appears there.
        self._mount("none", Path("/"), MS_REC | MS_SLAVE)
        self._mount("tmpfs", self._directory, 0, kind="tmpfs", data="mode=0755,size=1m")
        for name, source in self._fixed.items():
            self._add(name, source)
        for name in (SLOT, *IN_MEMORY):
            (self._directory / name).mkdir(mode=0o755)
        self._thread.entered = True

    @contextlib.contextmanager
    def showing(self, source: Path, in_memory: Mapping[str, str]) -> Iterator[Path]:
        """Mounts a directory in the calling thread's namespace, and new ones in memory with these options, by the names
        IN_MEMORY. Raises OSError."""
        self.enter()
        with contextlib.ExitStack() as stack:
            for name, options in in_memory.items():
                self._mount("tmpfs", self._directory / name, MS_NOSUID_NODEV, kind="tmpfs", data=options)
                stack.callback(self._unmount, self._directory / name)
            target = self._directory / SLOT
            self._mount(str(source), target, MS_BIND | MS_REC)
            stack.callback(self._unmount, target)
            yield target

    def _unmount(self, target: Path) -> None:
        # The mount point stays: removing a directory unmounts what lies on it in every other namespace too.
        self._check(self._libc.umount2(os.fsencode(target), MNT_DETACH), str(target))

    def _add(self, name: str, source: Path) -> None:
        target = self._directory / name
        if source.is_dir():
            target.mkdir(mode=0o755)
        else:
            target.touch()
        self._mount(str(source), target, MS_BIND | MS_REC)

    def _mount(self, source: str, target: Path, flags: int, kind: str | None = None, data: str | None = None) -> None:
        result = self._libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            data.encode() if data else None,
        )
        self._check(result, str(target))

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), what)
