"""Spans by OpenTelemetry, where the settings ask for them. Where to send them is said by OpenTelemetry's own variables.

Above: `services`. Below: `config`, `identity`; the extra `otel`, imported only when it is used.

A tool call has a span, child of the one that its client names (W3C Trace Context, https://www.w3.org/TR/trace-context/:
`traceparent` in the call's `_meta`, else among the request's headers). What the manager reports has happened already,
so these spans are made with their own start and end. They become children of the call's: tasks keep the context in
which they were made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sandboxes.lifecycle import Changed
from sandboxes.spec import Ending, Receipt, SessionKey
from toolhost.config import Settings
from toolhost.errors import ConfigurationError
from toolhost.identity import label

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

CONTEXT = ("traceparent", "tracestate")
INSTALL = "telemetry.traces needs OpenTelemetry's SDK and its exporter: pip install 'toolhost[otel]'"


def context_of(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """What a request's headers say of the trace that it is part of; empty when they say nothing."""
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in _CONTEXT_HEADERS}
    return found if CONTEXT[0] in found else {}


_CONTEXT_HEADERS = frozenset(name.encode() for name in CONTEXT)


def traces(settings: Settings) -> Traces | None:
    """What makes spans, where the settings ask for them. Raises ConfigurationError when the extra is not installed."""
    if not settings.telemetry.traces:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigurationError(INSTALL) from None
    resource = Resource.create({"service.name": settings.telemetry.service_name})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider.get_tracer("toolhost"))


class Traces:
    """Spans of tool calls, and an observer of the session manager (see `sandboxes.observer.Observer`) for what they
    wait for."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def call(self, tool: str, meta: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[Span]:
        """The span of a call while it is answered, the current one of whatever that starts. `meta`, `headers`: where
        the client may have said which span it belongs to; hostile."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        named = {name: value for name in CONTEXT if isinstance(value := meta.get(name), str)}
        carrier = named if CONTEXT[0] in named else headers
        # Named as OpenTelemetry's semantic conventions for MCP have it: the method, then the tool.
        with self._tracer.start_as_current_span(
            f"tools/call {tool}",
            context=extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            attributes={"mcp.method.name": "tools/call", "gen_ai.tool.name": tool},
        ) as span:
            yield span

    def answered(self, span: Span, key: SessionKey | None, error: str | None) -> None:
        """How a call went. `error`: the code of what the host could not do."""
        from opentelemetry.trace import StatusCode

        if key is not None:
            span.set_attribute("toolhost.session", label(key))
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)

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
