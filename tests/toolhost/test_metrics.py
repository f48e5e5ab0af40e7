"""Metrics and traces: what is counted when, and that watching harms nobody."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sandboxes.errors import EngineUnavailable, NoCapacity
from sandboxes.lifecycle import Changed
from sandboxes.observer import NullObserver
from sandboxes.spec import Retention, SessionKey
from tests.support.waiting import until
from tests.toolhost.managed import ManagedHost, key_of, managed, tokens_file
from toolhost.auth import Scope
from toolhost.config import load
from toolhost.errors import ConfigurationError
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
    there = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE toolhost_")}
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


async def test_spans_have_the_times_and_names_of_what_happened_and_no_secret(tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="no OpenTelemetry SDK (pip install 'toolhost[otel]')")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with managed(tmp_path, observers=(Traces(provider.get_tracer("test")),)) as host:
        with provider.get_tracer("test").start_as_current_span("the call") as call:
            outcome = await host.run("Zq3xK9vT7mW1pR5nL8cY2bH6", "1", retention=Retention.RETAINED, attempt="mine")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert {"execution", "sandbox start", "queue for admission", "engine launch"} <= spans.keys()
    execution = spans["execution"]
    assert execution.attributes["toolhost.attempt"] == "mine"
    assert execution.attributes["toolhost.ending"] == "ok"
    assert execution.end_time - execution.start_time == pytest.approx(
        (outcome.receipt.ended_at - (outcome.receipt.started_at or 0)) * 1e9, abs=1e3
    )
    assert execution.parent.span_id == call.get_span_context().span_id
    assert "Zq3xK9" not in str([dict(span.attributes) for span in spans.values()])


def test_traces_are_made_only_where_they_are_asked_for() -> None:
    assert traces(load()) == ()


def test_traces_without_their_extra_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"toolhost\[otel\]"):
        traces(load(flags={"telemetry": {"traces": True}}))
