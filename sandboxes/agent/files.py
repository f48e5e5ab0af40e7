"""File work in the session's directory. Everything here runs in a worker: a fork of the agent as the user's uid.

Above: `spool`, `transfers`. Below: `beneath`. Names are data; links are never followed; nothing that is not a regular
file is opened, so nothing blocks.
"""

from __future__ import annotations

import os

from . import beneath

OUTPUTS = ".outputs"
_PIECE = 1 << 20


def save(data: str, sequence: int) -> None:
    """Writes what comes on descriptor 0 into the outputs file of `sequence`; says "saved", or why not, on 1."""
    try:
        directory = beneath.open_directory(data, [OUTPUTS], make=True)
        name = f"{sequence}.txt"
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(name, flags, 0o644, dir_fd=directory)
        while piece := os.read(0, _PIECE):
            left = memoryview(piece)
            while left:
                left = left[os.write(target, left) :]
        os.close(target)
    except OSError as error:
        os.write(1, (error.strerror or "it failed").encode())
        return
    os.write(1, b"saved")
