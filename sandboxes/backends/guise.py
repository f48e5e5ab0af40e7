"""A sandbox's user, taken on by one thread of a root host while it starts a process: that is born as this user.

Above: the bubblewrap backend. Below: the kernel, for which credentials belong to threads, not to processes
(credentials(7)). The C library's own functions would change those of every thread, so the calls are made by number.

The thread keeps 0 as its saved uid, by which it comes back. What it executes cannot: execve(2) sets the saved ids to
the effective ones, and without a uid 0 no capability is left but inheritable ones, which the thread gives up for good.
So no program need be executed to change the uid, and the host's page tables are not copied, as `Popen(user=)` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Iterator

# Numbers of setgroups, setresgid, setresuid.
MACHINES = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
CAPABILITIES_3 = 0x20080522  # <linux/capability.h>: _LINUX_CAPABILITY_VERSION_3
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


class Guise:
    """For the threads of a process that is root."""

    def __init__(self, machine: str = platform.machine()) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._numbers = MACHINES.get(machine)
        self._dumpable = self._libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)

    @contextlib.contextmanager
    def worn(self, uid: int) -> Iterator[int | None]:
        """Meanwhile the calling thread is this user, and what it executes is so for good. Raises OSError.

        Yields the uid where it is not: on a machine whose numbers are not known here, `subprocess` is to be told.
        """
        self._give_up_inheritable()
        if self._numbers is None:
            yield uid
            return
        setgroups, setresgid, setresuid = self._numbers
        groups, gids = os.getgroups(), os.getresgid()
        try:
            self._set_groups(setgroups, [])
            self._call("setresgid", setresgid, uid, uid, gids[2])
            self._call("setresuid", setresuid, uid, uid, 0)
            if os.getresuid() != (uid, uid, 0) or os.getresgid()[:2] != (uid, uid) or os.getgroups():
                # Something between here and the kernel has other numbers, or only says that it was done.
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), f"setresuid {uid}")
            yield None
        finally:
            self._call("setresuid", setresuid, 0, 0, 0)
            self._call("setresgid", setresgid, *gids)
            self._set_groups(setgroups, groups)
            # The kernel takes it from the whole process, whichever thread changes: nobody could look at the host's
            # core, and it was not the host that became another.
            self._libc.prctl(PR_SET_DUMPABLE, self._dumpable, 0, 0, 0)

    def _give_up_inheritable(self) -> None:
        """And so the ambient ones: both outlast an execve(2)."""
        header, sets = _Header(CAPABILITIES_3, 0), (_Set * 2)()
        self._check(self._libc.capget(ctypes.byref(header), sets), "capget")
        for part in sets:
            part.inheritable = 0
        self._check(self._libc.capset(ctypes.byref(header), sets), "capset")

    def _set_groups(self, number: int, groups: list[int]) -> None:
        array = (ctypes.c_uint32 * len(groups))(*groups)
        result = self._libc.syscall(ctypes.c_long(number), ctypes.c_long(len(groups)), array)
        self._check(result, "setgroups")

    def _call(self, name: str, number: int, *ids: int) -> None:
        result = self._libc.syscall(ctypes.c_long(number), *(ctypes.c_long(value) for value in ids))
        self._check(result, f"{name} {ids[0]}")

    @staticmethod
    def _check(result: int, what: str) -> None:
        if result != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), what)
