"""What a model's server sends that no well-behaved one does: it reaches no tool, and the run still ends and is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.toolhost.loop.checks import check_stream
from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.mcp_double import Double
from tests.toolhost.loop.test_control import events_of
from tests.toolhost.loop.test_scenarios import PYTHON, python
from toolhost.loop.events import wire_json
from toolhost.loop.models.base import CallDelta
from toolhost.loop.models.chat import _Reader
from toolhost.loop.request import LoopRequest
from toolhost.loop.steps import parse_arguments
from toolhost.loop.trace import FileTraces, Trace

HALF = '{"code": "print(1) # \\ud800"}'


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_arguments_with_half_of_a_surrogate_pair_go_back_to_the_model(
    make_loop: MakeLoop, double: Double, tmp_path: Path, dialect: str
) -> None:
    driver, model = await make_loop([{"calls": [{"name": "python", "arguments": HALF}]}, {"text": "Sorry."}], dialect)
    run = await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON]))
    check_stream(await events_of(run))
    result = await run.result()
    assert (result.why, result.response.output_text) == ("answer", "Sorry.")
    assert not double.host.runs
    assert "hold characters that are no text" in json.dumps(model.requests[1])
    traces = FileTraces(tmp_path)
    traces.save(result.trace)
    assert "rejected" in [entry["kind"] for entry in traces.load(result.response.id)["entries"]]


@pytest.mark.parametrize("text", [HALF, '["\\udc00"]', '{"\\ud83d": 1}'])
def test_arguments_that_cannot_be_sent_are_told_from_broken_ones(text: str) -> None:
    told = parse_arguments(text)
    assert isinstance(told, str)
    assert told.endswith("(half of a surrogate pair). The call was not executed.")
    assert parse_arguments('{"code": "\\ud83d\\ude00"}') == {"code": "\U0001f600"}


def test_deeply_nested_arguments_are_refused() -> None:
    assert "nested too deeply" in str(parse_arguments('{"a":' * 100_000))


@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
async def test_half_of_a_surrogate_pair_in_a_models_text_becomes_the_replacement_character(
    make_loop: MakeLoop, dialect: str
) -> None:
    rounds = [{"reasoning": "a\udc00", "text": "a \ud800 \U0001f600", "calls": [python("1")]}, {"text": "\ud800"}]
    driver, _ = await make_loop(rounds, dialect)
    events = await events_of(await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON])))
    response = check_stream(events)
    assert response is not None
    assert response.output_text == "a \ufffd \U0001f600\ufffd"
    assert all(wire_json(event).encode() for event in events)


def test_a_trace_with_half_of_a_surrogate_pair_is_kept_as_it_was(tmp_path: Path) -> None:
    trace = Trace("resp_1", "local", "fake")
    trace.add("call", 1.0, output="a \ud800 ä")
    traces = FileTraces(tmp_path)
    traces.save(trace)
    assert traces.load("resp_1")["entries"][0]["output"] == "a \ud800 ä"


def chunk(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": list(calls)}, "finish_reason": None}]}


def call(index: int, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}


def read(*chunks: dict[str, Any]) -> list[Any]:
    reader = _Reader()
    return [delta for one in chunks for delta in reader.chunk(one)]


def test_parallel_calls_with_the_same_id_stay_apart() -> None:
    first, second = call(0, "call_0", "python", '{"code": "1"}'), call(1, "call_0", "python", '{"code": "2"}')
    apart = [CallDelta(0, "call_0", "python", '{"code": "1"}'), CallDelta(1, "call_0", "python", '{"code": "2"}')]
    assert read(chunk(first, second)) == apart
    assert read(chunk(first), chunk(second)) == apart
    whole = {"choices": [{"message": {"tool_calls": [first, second]}, "finish_reason": "tool_calls"}]}
    assert list(_Reader().whole(whole)) == apart


def test_a_nameless_fragment_under_a_new_index_belongs_to_the_call_with_its_id() -> None:
    deltas = read(chunk(call(0, "call_0", "python", '{"code"')), chunk(call(1, "call_0", "", ': "1"}')))
    assert [(delta.key, delta.arguments) for delta in deltas] == [(0, '{"code"'), (0, ': "1"}')]


async def test_parallel_calls_with_the_same_id_are_both_run(make_loop: MakeLoop, double: Double) -> None:
    calls = [{**python("print(1)"), "id": "same"}, {**python("print(2)"), "id": "same"}]
    driver, model = await make_loop([{"calls": calls}, {"text": "done"}])
    await events_of(await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON])))
    assert sorted(args["code"] for _, _, args in double.host.runs) == ["print(1)", "print(2)"]
    ids = [call["id"] for call in model.requests[1]["messages"][-3]["tool_calls"]]
    assert len(set(ids)) == 2
