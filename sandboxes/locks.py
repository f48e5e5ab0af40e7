"""A lock file that one process holds. It goes with the process, however that ends.

Above: whoever must be the only one in a directory or on a file. Below: `filelock`.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout


class Held(Exception):
    """Another process has the lock."""


def take(path: Path, mode: int = 0o644) -> FileLock:
    """The lock, taken; `release` gives it back, from any thread. Raises Held; OSError where no file can be."""
    lock = FileLock(path, mode=mode, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        # It says the same of a file that cannot be made, because another process may just have removed its directory.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode))
        raise Held from None
    return lock
