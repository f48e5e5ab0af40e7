"""The few system calls that the standard library has no cheap name for. `ctypes` takes 4 ms to import, `_ctypes` 0.4.

Above: `supervisor` and `spawn`. Below: libc's prctl(2).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# <linux/prctl.h>
_SET_DUMPABLE = 4
_CAPBSET_DROP = 24
_SET_CHILD_SUBREAPER = 36
_SET_SECCOMP = 22
_SET_NO_NEW_PRIVS = 38
_MODE_FILTER = 2  # <linux/seccomp.h>
_FILTER_BYTES = 8  # struct sock_filter
_LAST_CAPABILITY = 63


def _find() -> Callable[..., int]:
    try:
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        call = _ctypes.call_function
    except (ImportError, AttributeError, OSError):
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        return lambda option, value, third=0: int(prctl(option, value, third, 0, 0))
    return lambda option, value, third=0: int(call(address, (option, value, third, 0, 0)))


_prctl = _find()


def hide() -> None:
    """No other process of our uid may read our memory or use our descriptors: PR_SET_DUMPABLE, and so no ptrace and no
    /proc/PID/fd, mem or environ. Inherited by fork, undone by exec. Raises OSError."""
    if _prctl(_SET_DUMPABLE, 0) != 0:
        raise OSError("PR_SET_DUMPABLE was refused")


def show() -> None:
    """The opposite, for a process that has become another user's."""
    _prctl(_SET_DUMPABLE, 1)


def no_new_privileges() -> None:
    """Set-uid binaries gain nothing from here on, in every descendant. Raises OSError."""
    if _prctl(_SET_NO_NEW_PRIVS, 1) != 0:
        raise OSError("PR_SET_NO_NEW_PRIVS was refused")


def refuse_calls(program: bytes) -> None:
    """From here on every process below is refused the system calls that `program` (`struct sock_filter[]`) refuses,
    besides what others refuse already. Needs `no_new_privileges`. Raises OSError."""
    import _ctypes
    import struct

    count = len(program) // _FILTER_BYTES
    # What ctypes.create_string_buffer() does, without the 4 ms of ctypes.
    character: Any = type("character", (_ctypes._SimpleCData,), {"_type_": "c"})
    buffer: Any = type("buffer", (_ctypes.Array,), {"_type_": character, "_length_": len(program)})
    held = buffer.from_buffer_copy(program)
    # struct sock_fprog: unsigned short len; struct sock_filter *filter.
    pointer = struct.pack("@HP", count, _ctypes.addressof(held))
    if _prctl(_SET_SECCOMP, _MODE_FILTER, pointer) != 0:
        raise OSError("the system call filter was refused")


def adopt_orphans() -> None:
    """Descendants that lose their parent become our children also where we are not PID 1."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def empty_bounding_set() -> None:
    """Needs CAP_SETPCAP; without it the set stays, and no_new_privs keeps anyone from gaining from it."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _prctl(_CAPBSET_DROP, capability) != 0:
            break
