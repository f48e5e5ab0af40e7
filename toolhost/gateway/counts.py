"""What the gateway counts and times, for Prometheus. No principal, id or text of anybody is in it.

Above: `runs`, `app`. Below: prometheus-client.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
STATUSES = ("completed", "incomplete", "failed", "cancelled")


class Counts:
    """See the module. `registry`: the host's own, where both are one process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._responses = Counter(
            "toolhost_responses", "Responses that ended here, by status", ["status"], registry=self.registry
        )
        self._seconds = Histogram(
            "toolhost_response_seconds", "From a run's begin to its stored end", buckets=SECONDS, registry=self.registry
        )
        self._adopted = Counter(
            "toolhost_responses_adopted",
            "Responses of a dead gateway, by what was done",
            ["how"],
            registry=self.registry,
        )
        for status in STATUSES:  # so that rates exist before the first one
            self._responses.labels(status)
        for how in ("resumed", "closed"):
            self._adopted.labels(how)

    def watch(self, running: Callable[[], int]) -> None:
        """A gauge of the responses that this process runs or has queued."""
        gauge = Gauge("toolhost_responses_running", "Responses running or queued here", registry=self.registry)
        gauge.set_function(running)

    def ended(self, status: str, seconds: float) -> None:
        self._responses.labels(status if status in STATUSES else "failed").inc()
        self._seconds.observe(seconds)

    def adopted(self, how: str) -> None:
        self._adopted.labels(how).inc()
