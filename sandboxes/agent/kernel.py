"""The few system calls that the standard library has no cheap name for. `ctypes` takes 4 ms to import, `_ctypes` 0.4.

Above: `supervisor` and `spawn`. Below: libc's prctl(2).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# <linux/prctl.h>
_SET_DUMPABLE = 4
_CAPBSET_DROP = 24
_SET_CHILD_SUBREAPER = 36
_SET_NO_NEW_PRIVS = 38
_LAST_CAPABILITY = 63


def _find() -> Callable[[int, int], int]:
    try:
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        call = _ctypes.call_function
    except (ImportError, AttributeError, OSError):
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        return lambda option, value: int(prctl(option, value, 0, 0, 0))
    return lambda option, value: int(call(address, (option, value, 0, 0, 0)))


_prctl = _find()


def hide() -> None:
    """No other process of our uid may read our memory or use our descriptors: PR_SET_DUMPABLE, and so no ptrace and no
    /proc/PID/fd, mem or environ. Inherited by fork, undone by exec. Raises OSError."""
    if _prctl(_SET_DUMPABLE, 0) != 0:
        raise OSError("PR_SET_DUMPABLE was refused")


def no_new_privileges() -> None:
    """Set-uid binaries gain nothing from here on, in every descendant. Raises OSError."""
    if _prctl(_SET_NO_NEW_PRIVS, 1) != 0:
        raise OSError("PR_SET_NO_NEW_PRIVS was refused")


def adopt_orphans() -> None:
    """Descendants that lose their parent become our children also where we are not PID 1."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def empty_bounding_set() -> None:
    """Needs CAP_SETPCAP; without it the set stays, and no_new_privs keeps anyone from gaining from it."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _prctl(_CAPBSET_DROP, capability) != 0:
            break
