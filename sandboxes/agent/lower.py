"""What a process does to itself before it runs user code: descriptors and limits. Few imports: they stay in memory.

Above: `spawn`, `early`. Below: the kernel.
"""

from __future__ import annotations

import fcntl
import resource
from _stat import S_IMODE, S_IRWXU

from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_NICENESS = 5  # the control channel answers first, whatever user code does with the cpu


def lower(limits: Sequence[tuple[int, int]], data: str, identity: Sequence[int] | None) -> None:
    """This process takes what user code has. `identity`: uid and gid where they are others than the agent's."""
    if identity is not None:
        expose_to_out_of_memory(os.getpid())  # later it may not
    os.nice(_NICENESS)
    for limit, value in limits:
        _limit(limit, value)
    os.umask(0o022)
    if identity is not None:
        from . import kernel

        uid, gid = identity
        kernel.empty_bounding_set()
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _open_up(data)


def _open_up(directory: str) -> None:
    """The session's directory is its owner's to use, whatever a program of the owner's did to its mode: else nothing
    could be started in it any more, not even what would mend it."""
    try:
        mode = os.stat(directory).st_mode
        if mode & S_IRWXU != S_IRWXU:
            os.chmod(directory, S_IMODE(mode) | S_IRWXU)
    except OSError:
        return  # another's, or not there: what needs it says so


def rearrange(descriptors: Sequence[int], spare: int | None = None) -> int:
    """`descriptors` become 0, 1, 2, ...; `spare` the next, closed on exec; everything else is closed."""
    wanted = [*descriptors] if spare is None else [*descriptors, spare]
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, len(wanted)) for fd in wanted]
    for number, fd in enumerate(held):
        os.dup2(fd, number, inheritable=number < len(descriptors))
    os.closerange(len(wanted), 1 << 20)
    return len(descriptors)


def _limit(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(limit, (value, value))


def expose_to_out_of_memory(pid: int) -> None:
    """The out-of-memory killer takes user code before the agent. Best effort: without /proc there is no other way."""
    try:
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, b"1000")
    except OSError:
        return
    finally:
        os.close(fd)
