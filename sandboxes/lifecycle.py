"""The life of a session: states and transitions as data. Pure: no I/O, no clock; it decides, `manager` performs.

Above: `manager`, `session`. Below: `errors`.

    new -> starting -> idle <-> running -> closing -> closed
    starting | idle | running -> lost -> starting (on the next call) | closing;   new | lost -> closing

A start that fails leads to `lost` as well: there is no sandbox, and the next call starts one.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from sandboxes.errors import IllegalTransition

HISTORY = 50  # transitions that a refusal shows


class Phase(enum.StrEnum):
    """Where a session is."""

    NEW = "new"  # it has a record, and no sandbox yet
    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    LOST = "lost"  # its sandbox is gone; the session goes on with the next call
    CLOSING = "closing"
    CLOSED = "closed"


class Transition(enum.StrEnum):
    """What can happen to a session."""

    START = "start"
    READY = "ready"
    START_FAILED = "start_failed"
    CALL = "call"
    DONE = "done"
    LOSE = "lose"
    CLOSE = "close"
    FINISH = "finish"


class CloseReason(enum.StrEnum):
    """Why a session was closed. Kept in its record."""

    CLEANUP = "cleanup"
    IDLE = "idle"
    LIFETIME = "lifetime"
    OPERATOR = "operator"
    EVICTED = "evicted"
    DISCONNECT = "disconnect"
    FAILED = "failed"
    SHUTDOWN = "shutdown"


TABLE: Mapping[tuple[Phase, Transition], Phase] = {
    (Phase.NEW, Transition.START): Phase.STARTING,
    (Phase.LOST, Transition.START): Phase.STARTING,
    (Phase.STARTING, Transition.READY): Phase.IDLE,
    (Phase.STARTING, Transition.START_FAILED): Phase.LOST,
    (Phase.IDLE, Transition.CALL): Phase.RUNNING,
    (Phase.RUNNING, Transition.DONE): Phase.IDLE,
    (Phase.STARTING, Transition.LOSE): Phase.LOST,
    (Phase.IDLE, Transition.LOSE): Phase.LOST,
    (Phase.RUNNING, Transition.LOSE): Phase.LOST,
    **{
        (phase, Transition.CLOSE): Phase.CLOSING
        for phase in (Phase.NEW, Phase.STARTING, Phase.IDLE, Phase.RUNNING, Phase.LOST)
    },
    (Phase.CLOSING, Transition.FINISH): Phase.CLOSED,
}

LIVE = frozenset({Phase.IDLE, Phase.RUNNING})  # there is a sandbox that answers
OVER = frozenset({Phase.CLOSING, Phase.CLOSED})


@dataclass(frozen=True, slots=True)
class Changed:
    """A transition that was made. `reason` is that of a CLOSE, else empty or a remark for people."""

    transition: Transition
    source: Phase
    target: Phase
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.source} -{self.transition}-> {self.target}" + (f" ({self.reason})" if self.reason else "")


class Lifecycle:
    """One session's place in the table, and how it came there."""

    def __init__(self, session: str, phase: Phase = Phase.NEW) -> None:
        """`phase` is another than NEW where a record is taken up again after a restart."""
        self.session = session
        self.phase = phase
        self._history: deque[Changed] = deque(maxlen=HISTORY)

    @property
    def history(self) -> tuple[str, ...]:
        """What happened, oldest first."""
        return tuple(str(changed) for changed in self._history)

    def allows(self, transition: Transition) -> bool:
        return (self.phase, transition) in TABLE

    def apply(self, transition: Transition, reason: str = "") -> Changed:
        """Makes a transition. Raises IllegalTransition, and then nothing has changed."""
        target = TABLE.get((self.phase, transition))
        if target is None:
            raise IllegalTransition(
                f"a session that is {self.phase} cannot {transition}", history=self.history, session=self.session
            )
        changed = Changed(transition, self.phase, target, reason)
        self.phase = target
        self._history.append(changed)
        return changed
