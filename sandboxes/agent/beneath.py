"""Opens what lies below a directory and nothing else, whatever links were planted there.

Above: `files`, `changes` (in workers that run as the user's uid). Below: openat(2) with O_NOFOLLOW, one component at a
time: a link, also one that is swapped in between, is an error and never followed.

Not with O_DIRECTORY: gVisor's kernel then follows a link in spite of O_NOFOLLOW (seen with its release of 2022). What
was opened is asked what it is instead.
"""

from __future__ import annotations

import errno
import os
import stat

_DIRECTORY = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 64


class Outside(ValueError):
    """The path does not name anything below the directory."""


def parts(path: str, data: str) -> list[str]:
    """The components of `path`, which is relative to `data` or absolute below it. Raises Outside."""
    if "\0" in path or len(path) > 4096:
        raise Outside("a path has at most 4096 characters and no NUL")
    if path.startswith("/"):
        if path != data and not path.startswith(data + "/"):
            raise Outside(f"only paths below {data} can be used")
        path = path[len(data) :]
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names:
        raise Outside("a path may not contain '..'")
    if len(names) > MAX_DEPTH:
        raise Outside(f"a path has at most {MAX_DEPTH} components")
    return names


def open_directory(data: str, names: list[str], *, make: bool = False) -> int:
    """A descriptor of the directory `names` below `data`. Raises OSError: ELOOP or ENOTDIR for a link on the way."""
    fd = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in names:
        try:
            if make:
                _make(fd, name)
            below = os.open(name, _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return fd


def _make(fd: int, name: str) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=fd)
    except FileExistsError:
        return
