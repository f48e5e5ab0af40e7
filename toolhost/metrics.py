"""What is counted and timed, as Prometheus reads it at /metrics. No principal, key or text of anybody is in it.

Above: `services` (hands it to the manager), `app` (the route). Below: sandboxes' public API, prometheus-client.
Each metric's meaning for operators is in docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from sandboxes.lifecycle import Changed, CloseReason, Phase, Transition
from sandboxes.spec import Ending, Receipt, SessionKey, State

if TYPE_CHECKING:
    from sandboxes.backends.ray_names import NodeInfo

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CALL_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
START_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
OTHER_PHASES = frozenset({Phase.CLOSED})  # a closed session is counted by its closing


class Cluster(Protocol):
    """A backend whose sandboxes are on many nodes."""

    def nodes(self) -> Sequence[NodeInfo]: ...

    @property
    def head_answers(self) -> bool: ...


class Metrics:
    """An observer of the session manager (see `sandboxes.observer.Observer`)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for process in (ProcessCollector, PlatformCollector, GCCollector):
            process(registry=self.registry)
        self._starts = self._histogram(
            "sandbox_start_seconds", "Until a sandbox was ready, queue not counted", START_BUCKETS, "source"
        )
        self._queued = self._histogram("queue_seconds", "Wait before a call went on", CALL_BUCKETS, "what")
        self._executions = self._histogram("execution_seconds", "From code's start to its end", CALL_BUCKETS)
        self._engine = self._histogram("engine_call_seconds", "Calls of the backend", START_BUCKETS, "operation")
        self._endings = self._counter("executions", "Executions by how they ended", "ending", "state")
        self._closings = self._counter("sessions_closed", "Sessions closed, by reason", "reason")
        self._losses = self._counter("sandboxes_lost", "Sandboxes that went without being told to")
        self._engine_errors = self._counter("engine_errors", "Calls of the backend that failed", "operation", "error")
        self._errors = self._counter("errors", "What the host could not do, by kind", "where", "error")
        self._ended: dict[tuple[Ending, State], Counter] = {}
        for reason in CloseReason:  # so that rates exist before the first event
            self._closings.labels(reason.value)
        for source in ("pool", "launch"):
            self._starts.labels(source)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"toolhost_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"toolhost_{name}", text, labels, registry=self.registry)

    def watch(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Gauges of what is the case when they are read. `counts`: as `SessionManager.counts`."""
        self.registry.register(_Gauges(counts))

    def watch_nodes(self, cluster: Cluster) -> None:
        """Gauges of the nodes that sessions run on, as they were a moment ago."""
        self.registry.register(_NodeGauges(cluster))

    def render(self) -> bytes:
        """The text format, version 0.0.4."""
        return generate_latest(self.registry)

    # --- the observer ------------------------------------------------------------------------------------------------

    def session_changed(self, key: SessionKey, changed: Changed) -> None:
        if changed.transition is Transition.CLOSE:
            self._closings.labels(changed.reason).inc()
        elif changed.transition is Transition.LOSE:
            self._losses.inc()

    def sandbox_started(self, key: SessionKey, source: str, duration_s: float) -> None:
        self._starts.labels(source).observe(duration_s)

    def queued(self, key: SessionKey, what: str, duration_s: float) -> None:
        self._queued.labels(what).observe(duration_s)

    def execution_ended(self, key: SessionKey, receipt: Receipt) -> None:
        how = (receipt.ending, receipt.state)
        if (counter := self._ended.get(how)) is None:  # looking a label up costs more than counting
            counter = self._ended[how] = self._endings.labels(receipt.ending.value, receipt.state.value)
        counter.inc()
        if receipt.started_at is not None:
            self._executions.observe(max(0.0, receipt.ended_at - receipt.started_at))

    def engine_call(self, operation: str, duration_s: float, error: str) -> None:
        self._engine.labels(operation).observe(duration_s)
        if error:
            self._engine_errors.labels(operation, error).inc()

    def failed(self, where: str, error: BaseException) -> None:
        self._errors.labels(where, type(error).__name__).inc()


class _Gauges(Collector):
    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        counts = self._counts()
        sessions = GaugeMetricFamily("toolhost_sessions", "Open sessions by state", labels=["state"])
        for phase in Phase:
            if phase not in OTHER_PHASES:
                sessions.add_metric([phase.value], counts.get(phase.value, 0))
        yield sessions
        for name, text in (
            ("pool", "Warm sandboxes that are ready"),
            ("waiting", "Calls that wait for a place"),
            ("held", "Places taken by sessions' sandboxes"),
            ("places", "Places that there are in all"),
        ):
            if name in counts:
                yield GaugeMetricFamily(f"toolhost_{GAUGES[name]}", text, value=counts[name])


class _NodeGauges(Collector):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[GaugeMetricFamily]:
        head = "Whether the cluster's head answers: without it live sessions go on, and no new one starts"
        yield GaugeMetricFamily("toolhost_cluster_head_up", head, value=float(self._cluster.head_answers))
        nodes = self._cluster.nodes()
        figures: tuple[tuple[str, str, Callable[[NodeInfo], float]], ...] = (
            ("up", "Whether the node takes or would take sessions", lambda node: float(node.alive)),
            ("draining", "Whether the node was told to take no new sessions", lambda node: float(node.draining)),
            ("sandboxes", "Sandboxes that run on the node, of all tool hosts", lambda node: node.sandboxes),
            ("sandboxes_limit", "Sandboxes that the node takes", lambda node: node.capacity),
        )
        for name, text, value in figures:
            family = GaugeMetricFamily(f"toolhost_node_{name}", text, labels=["node"])
            for node in nodes:
                family.add_metric([node.host], value(node))
            yield family


GAUGES = {"pool": "pool_ready", "waiting": "queue_length", "held": "sandboxes", "places": "sandboxes_limit"}
