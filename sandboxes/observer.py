"""What the manager tells whoever measures it: metrics, traces, logs. It never waits for them, and they never raise.

Above: `toolhost.telemetry` implements it. Below: `lifecycle`, `spec`.
"""

from __future__ import annotations

from typing import Protocol

from sandboxes.lifecycle import Changed
from sandboxes.spec import Receipt, SessionKey


class Observer(Protocol):
    """Called on the event loop, at once: an implementation only counts or hands on. Durations are seconds."""

    def session_changed(self, key: SessionKey, changed: Changed) -> None:
        """A transition of a session; a CLOSE carries its reason."""

    def sandbox_started(self, key: SessionKey, source: str, duration_s: float) -> None:
        """A sandbox is ready. `source`: "pool" or "launch". Without the time in the admission queue."""

    def queued(self, key: SessionKey, what: str, duration_s: float) -> None:
        """A call waited for "admission" or for its "turn", and now goes on."""

    def execution_ended(self, key: SessionKey, receipt: Receipt) -> None:
        """An execution has its outcome."""

    def engine_call(self, operation: str, duration_s: float, error: str) -> None:
        """A call of the backend returned; `error` is the class name of what it raised, or empty."""

    def failed(self, where: str, error: BaseException) -> None:
        """The host could not do something, and went on. `where`: "start", "destroy", "store", "channel", ..."""


class NullObserver:
    """Nobody looks."""

    def session_changed(self, key: SessionKey, changed: Changed) -> None: ...

    def sandbox_started(self, key: SessionKey, source: str, duration_s: float) -> None: ...

    def queued(self, key: SessionKey, what: str, duration_s: float) -> None: ...

    def execution_ended(self, key: SessionKey, receipt: Receipt) -> None: ...

    def engine_call(self, operation: str, duration_s: float, error: str) -> None: ...

    def failed(self, where: str, error: BaseException) -> None: ...
