"""What callers may watch of a running execution. Frozen data; the outcome itself is returned, never an event.

Above: namespaces (progress notifications), telemetry. Below: the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Queued:
    """It waits: for a place on the host (`what` = "admission") or for an earlier call of its session ("turn")."""

    what: str
    position: int


@dataclass(frozen=True, slots=True)
class Started:
    """Its code runs now; the deadline counts from here."""

    attempt_id: str
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Printed:
    """Output as it appears, best effort: the outcome has the whole."""

    attempt_id: str
    text: str


ExecutionEvent = Queued | Started | Printed
OnEvent = Callable[[ExecutionEvent], None]
