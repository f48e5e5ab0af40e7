"""Metrics and traces: what is counted when, and that watching harms nobody."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from sandboxes.backends.ray_names import NodeInfo
from sandboxes.errors import EngineUnavailable, NoCapacity
from sandboxes.lifecycle import Changed
from sandboxes.observer import NullObserver
from sandboxes.spec import SessionKey
from tests.support.waiting import until
from tests.toolhost.managed import ManagedHost, key_of, managed, tokens_file
from toolhost.auth import Scope
from toolhost.config import load
from toolhost.errors import ConfigurationError
from toolhost.metrics import Metrics
from toolhost.tracing import Traces, traces


async def scraped(host: ManagedHost, who: str | None = None) -> dict[str, float]:
    answer = await host.ask("/metrics", who=who)
    assert answer.status == 200
    assert (answer.header("content-type") or "").startswith("text/plain; version=0.0.4")
    lines = [line.rsplit(" ", 1) for line in answer.body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


async def test_starts_executions_queues_and_closings_are_counted(tmp_path: Path) -> None:
    async with managed(tmp_path, manager={"pool_size": 1}) as host:
        await until(lambda: host.manager.counts["pool"] == 1, "no warm sandbox")
        await host.run("a", "1")
        await host.run("a", "1 / 0")
        await host.run("b", "1")
        await host.manager.close_session(key_of("b"))
        found = await scraped(host)
    assert found['toolhost_sessions{state="idle"}'] == 1
    assert found['toolhost_sandbox_start_seconds_count{source="pool"}'] >= 1
    starts = [found[f'toolhost_sandbox_start_seconds_count{{source="{source}"}}'] for source in ("pool", "launch")]
    assert sum(starts) == 2
    assert found['toolhost_executions_total{ending="ok",state="kept"}'] == 2
    assert found['toolhost_executions_total{ending="raised",state="kept"}'] == 1
    assert found["toolhost_execution_seconds_count"] == 3
    assert found['toolhost_queue_seconds_count{what="admission"}'] == 2
    assert found['toolhost_sessions_closed_total{reason="operator"}'] == 1
    assert found['toolhost_sessions_closed_total{reason="idle"}'] == 0
    assert found['toolhost_engine_call_seconds_count{operation="launch"}'] >= 1
    assert found["toolhost_sandboxes"] == 1
    assert found["toolhost_sandboxes_limit"] == 64
    assert found["process_open_fds"] > 0


async def test_errors_are_counted_by_kind(tmp_path: Path) -> None:
    async with managed(tmp_path, manager={"max_sessions": 1, "queue_s": 0.05}) as host:
        await host.run("a")
        with pytest.raises(NoCapacity):
            await host.run("b")
        host.engine.fails["launch"] = EngineUnavailable("down")
        await host.manager.close_session(key_of("a"))
        with pytest.raises(EngineUnavailable):
            await host.run("a")
        found = await scraped(host)
    assert found['toolhost_errors_total{error="NoCapacity",where="call"}'] == 1
    assert found['toolhost_errors_total{error="EngineUnavailable",where="start"}'] == 1
    assert found['toolhost_errors_total{error="EngineUnavailable",where="call"}'] == 1
    assert found['toolhost_engine_errors_total{error="EngineUnavailable",operation="launch"}'] == 1


async def test_a_lost_sandbox_is_counted(tmp_path: Path) -> None:
    async with managed(tmp_path) as host:
        await host.run("a")
        (sandbox,) = host.engine.sandboxes.values()
        sandbox.agent.die()
        await host.run("a", "1")
        assert (await scraped(host))["toolhost_sandboxes_lost_total"] == 1


async def test_metrics_need_a_token_where_there_are_tokens_and_name_nobody(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path / "tokens", prometheus=(Scope.USE,))
    async with managed(tmp_path, tokens=tokens) as host:
        await host.run("who-is-it", principal="somebody")
        assert (await host.ask("/metrics")).status == 401
        text = (await host.ask("/metrics", who="prometheus")).body.decode()
    assert "toolhost_sessions" in text
    assert "who-is-it" not in text
    assert "somebody" not in text


async def test_every_metric_is_explained_and_every_explained_one_is_there(tmp_path: Path) -> None:
    pages = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    explained = {name for line in pages.splitlines() if line.startswith("| `toolhost_") for name in _names(line)}
    async with managed(tmp_path) as host:
        await host.run("a")
        text = (await host.ask("/metrics")).body.decode()
    lines = [*text.splitlines(), *of_nodes()]
    there = {line.split()[2] for line in lines if line.startswith("# TYPE toolhost_")}
    assert explained == {name for name in there if not name.endswith("_created")}


def _names(line: str) -> list[str]:
    return re.findall(r"`(toolhost_\w+)`", line.split("|")[1])


class Failing(NullObserver):
    def session_changed(self, key: SessionKey, changed: Changed) -> None:
        raise RuntimeError("an observer's own fault")


async def test_an_observer_that_fails_harms_neither_calls_nor_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with managed(tmp_path, observers=(Failing(),)) as host:
        assert (await host.run("a", "6 * 7")).value == "42"
        assert (await scraped(host))['toolhost_sessions{state="idle"}'] == 1
    assert "an observer failed" in caplog.text


class Spans:
    """Keeps the spans of a host in memory."""

    def __init__(self) -> None:
        sdk = pytest.importorskip(
            "opentelemetry.sdk.trace", reason="no OpenTelemetry SDK (pip install 'toolhost[otel]')"
        )
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = Traces(provider.get_tracer("test"))

    def of(self, trace: int) -> dict[str, Any]:
        """Those of one trace, by name."""
        found = self._exporter.get_finished_spans()
        return {span.name: span for span in found if span.context.trace_id == trace}

    @property
    def everything(self) -> str:
        return str([(span.name, dict(span.attributes)) for span in self._exporter.get_finished_spans()])


TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"
SECRET = "Zq3xK9vT7mW1pR5nL8cY2bH6"


@pytest.mark.parametrize("way", ["header", "meta"])
async def test_a_calls_span_belongs_to_its_clients_trace_and_has_what_it_waited_for_as_children(
    tmp_path: Path, way: str
) -> None:
    spans = Spans()
    kept = [("x-toolhost-session", SECRET)]
    async with managed(tmp_path, traces=spans.traces) as host, await host.connect(None, headers=kept) as stream:
        meta = {"toolhost/attempt-id": "mine"}
        if way == "meta":
            meta["traceparent"] = TRACEPARENT
        else:
            stream.sent_headers = [*stream.sent_headers, ("traceparent", TRACEPARENT), ("tracestate", "a=b")]
        result = await stream.tool("python", {"code": "1"}, meta=meta)
    found, receipt = spans.of(TRACE), result["_meta"]["toolhost/receipt"]
    call = found["tools/call python"]
    assert call.parent.span_id == PARENT
    for name in ("queue for admission", "sandbox start", "engine launch", "execution"):
        child = found[name]
        assert child.parent.span_id == call.context.span_id, name
        assert call.start_time <= child.start_time <= child.end_time <= call.end_time, name
    execution = found["execution"]
    assert (execution.attributes["toolhost.attempt"], execution.attributes["toolhost.ending"]) == ("mine", "ok")
    took = receipt["ended_at"] - receipt["started_at"]
    assert execution.end_time - execution.start_time == pytest.approx(took * 1e9, abs=1e3)
    assert SECRET not in spans.everything


async def test_over_streamable_http_a_calls_span_belongs_to_the_trace_of_its_request(tmp_path: Path) -> None:
    spans = Spans()
    async with (
        managed(tmp_path, traces=spans.traces) as host,
        httpx2.AsyncClient(headers={"traceparent": TRACEPARENT}, timeout=60) as http,
        streamable_http_client(f"{host.url}/mcp", http_client=http) as streams,
        ClientSession(streams[0], streams[1]) as client,
    ):
        await client.initialize()
        await client.call_tool("python", {"code": "1"})
    found = spans.of(TRACE)
    assert found["tools/call python"].parent.span_id == PARENT
    assert found["execution"].parent.span_id == found["tools/call python"].context.span_id


async def test_a_calls_span_says_what_the_host_could_not_do_and_nothing_that_a_client_made_up(tmp_path: Path) -> None:
    spans = Spans()
    async with managed(tmp_path, traces=spans.traces) as host, await host.connect("a") as stream:
        for parent in (TRACEPARENT.upper(), "00-0-0-0", "\x00", 7, {"a": 1}):
            await stream.tool("python", {"code": "1"}, meta={"traceparent": parent})
        await stream.tool("no such tool <secret>", {}, meta={"traceparent": TRACEPARENT})
        answer = await stream.tool("python", {"code": "1"}, meta={"toolhost/timeout": -1, "traceparent": TRACEPARENT})
        assert answer["isError"]
    found = spans.of(TRACE)
    assert not found["tools/call unknown"].status.is_ok
    assert found["tools/call python"].attributes["error.type"] == "bad_arguments"
    assert "secret" not in spans.everything


def test_traces_are_made_only_where_they_are_asked_for() -> None:
    assert traces(load()) is None


def test_traces_without_their_extra_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"toolhost\[otel\]"):
        traces(load(flags={"telemetry": {"traces": True}}))


class TwoNodes:
    head_answers = False

    def nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo("10.0.0.1:7000/aaaaaaaaaaaa", "10.0.0.1", True, capacity=50, sandboxes=20),
            NodeInfo("10.0.0.2/bbbbbbbbbbbb", "10.0.0.2", False, True, capacity=50, problem="no bubblewrap"),
        ]


def of_nodes() -> list[str]:
    metrics = Metrics()
    metrics.watch_nodes(TwoNodes())
    return metrics.render().decode().splitlines()


def test_nodes_of_a_cluster_are_told_one_by_one() -> None:
    lines = of_nodes()
    for line in (
        "toolhost_cluster_head_up 0.0",
        'toolhost_node_up{node="10.0.0.1"} 1.0',
        'toolhost_node_up{node="10.0.0.2"} 0.0',
        'toolhost_node_draining{node="10.0.0.2"} 1.0',
        'toolhost_node_sandboxes{node="10.0.0.1"} 20.0',
        'toolhost_node_sandboxes_limit{node="10.0.0.1"} 50.0',
    ):
        assert line in lines
