"""Spans by OpenTelemetry, where the settings ask for them. Where to send them is said by OpenTelemetry's own variables.

Above: `services`. Below: `config`, `identity`; the extra `otel`, imported only when it is used.

What the manager reports has happened already, so a span is made with its own start and end. It becomes a child of the
call's span: tasks keep the context in which they were made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sandboxes.lifecycle import Changed
from sandboxes.observer import Observer
from sandboxes.spec import Ending, Receipt, SessionKey
from toolhost.config import Settings
from toolhost.errors import ConfigurationError
from toolhost.identity import label

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

INSTALL = "telemetry.traces needs OpenTelemetry's SDK and its exporter: pip install 'toolhost[otel]'"


def traces(settings: Settings) -> Sequence[Observer]:
    """The observer that makes spans, or none. Raises ConfigurationError when the extra is not installed."""
    if not settings.telemetry.traces:
        return ()
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigurationError(INSTALL) from None
    resource = Resource.create({"service.name": settings.telemetry.service_name})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)  # the MCP SDK's spans, if any, go the same way
    return (Traces(provider.get_tracer("toolhost")),)


class Traces:
    """An observer of the session manager (see `sandboxes.observer.Observer`)."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def session_changed(self, key: SessionKey, changed: Changed) -> None: ...

    def sandbox_started(self, key: SessionKey, source: str, duration_s: float) -> None:
        self._span("sandbox start", duration_s, {"toolhost.session": label(key), "toolhost.source": source})

    def queued(self, key: SessionKey, what: str, duration_s: float) -> None:
        self._span(f"queue for {what}", duration_s, {"toolhost.session": label(key)})

    def execution_ended(self, key: SessionKey, receipt: Receipt) -> None:
        attributes: dict[str, str | int] = {
            "toolhost.session": label(key),
            "toolhost.attempt": receipt.attempt_id,
            "toolhost.epoch": receipt.epoch,
            "toolhost.sequence": receipt.sequence,
            "toolhost.ending": receipt.ending.value,
            "toolhost.state": receipt.state.value,
            "toolhost.bytes_out": receipt.bytes_out,
        }
        began = receipt.queued_at if receipt.started_at is None else receipt.started_at
        ours = receipt.ending in (Ending.LOST, Ending.NEVER_STARTED)
        self._span_between("execution", began, receipt.ended_at, attributes, error=receipt.ending if ours else "")

    def engine_call(self, operation: str, duration_s: float, error: str) -> None:
        self._span(f"engine {operation}", duration_s, {}, error=error)

    def failed(self, where: str, error: BaseException) -> None: ...

    def _span(self, name: str, duration_s: float, attributes: dict[str, str | int], *, error: str = "") -> None:
        now = time.time()
        self._span_between(name, now - duration_s, now, attributes, error=error)

    def _span_between(
        self, name: str, began: float, ended: float, attributes: dict[str, str | int], *, error: str = ""
    ) -> None:
        from opentelemetry.trace import StatusCode

        span = self._tracer.start_span(name, attributes=attributes, start_time=int(began * 1e9))
        if error:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(int(max(began, ended) * 1e9))
