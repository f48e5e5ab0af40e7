"""Finds the files below a directory whose inode changed since some time. Names and times only.

Above: `interpreter`, after each cell, and the worker of `changes`. Both run as the user's uid.
"""

from __future__ import annotations

import sys
from time import monotonic

from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
else:
    from .pristine import OS as os

globals()["__builtins__"] = BUILTINS

MAX_REPORTED = 50
_SCAN_S = 0.05
_MAX_ENTRIES = 5000
_MAX_DEPTH = 6
_OUT_OF_DESCRIPTORS = (23, 24)  # errno.ENFILE, errno.EMFILE
_NAMES = sys.getfilesystemencoding()


class Look:
    """Does not report the same change twice: path -> (time of change, size, inode)."""

    def __init__(self, data: str) -> None:
        self._data = data
        self._told: dict[str, tuple[int, int, int]] = {}
        self._bare: tuple[int, int] | None = None  # when the directory changed last, if nothing in it can change alone

    def since(self, after: int) -> list[dict[str, object]]:
        """[{path, size, at}], not by the time of modification, which programs set as they like, but by that of the
        inode's change (`at`, nanoseconds), which is not before `after`. Raises OSError when there is no descriptor to
        look with."""
        stamp = self._stamp()
        if stamp is not None and stamp == self._bare:
            return []
        until = monotonic() + _SCAN_S
        now: dict[str, tuple[int, int, int]] = {}
        pending = [(self._data, 0)]
        seen = 0
        bare = True
        while pending and seen <= _MAX_ENTRIES and monotonic() < until:
            directory, depth = pending.pop()
            below, count, files = self._list(directory, after, now)
            bare = bare and not below and not files
            seen += count
            pending += [(path, depth + 1) for path in below if depth < _MAX_DEPTH]
        changed = [path for path, stamp in now.items() if self._told.get(path) != stamp]
        self._told = now
        # What comes after this look is dated later than this: the look was made after `after`.
        self._bare = stamp if bare and stamp is not None and stamp[0] < after else None
        return [{"path": _shown(path), "size": now[path][1], "at": now[path][0]} for path in changed[:MAX_REPORTED]]

    def _stamp(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self._data)
        except OSError:
            return None
        return stat.st_ctime_ns, stat.st_ino

    @staticmethod
    def _list(directory: str, after: int, into: dict[str, tuple[int, int, int]]) -> tuple[list[str], int, bool]:
        """Adds the regular files of a directory that changed; returns its directories, how much was in it, and whether
        there are files at all. Hidden directories are not looked into."""
        below: list[str] = []
        count = 0
        files = False
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    count += 1
                    if count > _MAX_ENTRIES:
                        files = True
                        break
                    if entry.is_dir(follow_symlinks=False):
                        if not entry.name.startswith("."):
                            below.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        files = True
                        stat = entry.stat(follow_symlinks=False)
                        if stat.st_ctime_ns >= after:
                            into[entry.path] = (stat.st_ctime_ns, stat.st_size, stat.st_ino)
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise
            files = True  # it is not known what is there
        return below, count, files


def _shown(path: str) -> str:
    return path.encode(_NAMES, "surrogateescape").decode("utf-8", "replace")
