"""The C half of `signal`: the module around it builds enumerations, which takes 5 ms.

Above: everything in the agent that sends or handles signals; the launcher, for `forget_inherited`.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

__all__ = ["forget_inherited", "signal"]


def forget_inherited() -> None:
    """Blocks and ignores no signal that what started this process did: whatever it starts would inherit that.

    Ray's workers block signals. A shell without job control ignores SIGINT and SIGQUIT in what it starts with `&`,
    nohup(1) ignores SIGHUP, and where SIGCHLD is ignored no child can be waited for.
    """
    for number in range(1, signal.NSIG):
        # Python itself ignores the two, here and in each interpreter; `spawn` gives programs the default.
        if number not in (signal.SIGPIPE, signal.SIGXFSZ) and signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
