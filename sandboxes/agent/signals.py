"""The C half of `signal`: the module around it builds enumerations, which takes 5 ms.

Above: everything in the agent that sends or handles signals.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

__all__ = ["signal", "to_defaults"]

# Python ignores some of these, who started the host may ignore the others (a shell's background job, nohup): an ignored
# signal stays ignored after exec.
_DEFAULTS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGHUP,
    signal.SIGQUIT,
)


def to_defaults() -> None:
    """In a child, before it becomes what runs user code: signals do what they do by default."""
    for number in _DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
