"""Several observers as one.

Above: `services`. Below: `sandboxes.observer`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sandboxes.lifecycle import Changed
from sandboxes.observer import Observer
from sandboxes.spec import Receipt, SessionKey

log = logging.getLogger("toolhost.observers")


class Observers:
    """Tells each in turn. One that fails is logged, and harms neither the others nor the session."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def _each(self, tell: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:
                log.exception("an observer failed")

    def session_changed(self, key: SessionKey, changed: Changed) -> None:
        for observer in self._observers:  # as `_each` does; this one is told twice for each call
            try:
                observer.session_changed(key, changed)
            except Exception:
                log.exception("an observer failed")

    def sandbox_started(self, key: SessionKey, source: str, duration_s: float) -> None:
        self._each(lambda observer: observer.sandbox_started(key, source, duration_s))

    def queued(self, key: SessionKey, what: str, duration_s: float) -> None:
        self._each(lambda observer: observer.queued(key, what, duration_s))

    def execution_ended(self, key: SessionKey, receipt: Receipt) -> None:
        self._each(lambda observer: observer.execution_ended(key, receipt))

    def engine_call(self, operation: str, duration_s: float, error: str) -> None:
        self._each(lambda observer: observer.engine_call(operation, duration_s, error))

    def failed(self, where: str, error: BaseException) -> None:
        self._each(lambda observer: observer.failed(where, error))
