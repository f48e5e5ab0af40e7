"""The C half of `signal`: the module around it builds enumerations, which takes 5 ms.

Above: everything in the agent that sends or handles signals.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

__all__ = ["signal"]
