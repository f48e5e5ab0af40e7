"""What a model's server sends that no well-behaved one does: it reaches no tool, and the run still ends and is kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.toolhost.loop.checks import check_stream
from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.mcp_double import Double
from tests.toolhost.loop.test_control import events_of
from tests.toolhost.loop.test_scenarios import PYTHON, python
from toolhost.loop.errors import ModelError
from toolhost.loop.events import wire_json
from toolhost.loop.fake_wire import WIRES, Answer, Fragment
from toolhost.loop.models.base import CallDelta, ModelRequest, ReasoningDelta, TextDelta, Usage
from toolhost.loop.models.chat import _Reader
from toolhost.loop.models.registry import ADAPTERS, connect
from toolhost.loop.models.wire import Wire
from toolhost.loop.request import Limits, LoopRequest
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


ANSWER = Answer(
    [
        Fragment("reasoning", "hm"),
        Fragment("text", "hello"),
        Fragment("call", index=0, call_id="c", name="python"),
        Fragment("call", '{"code": "1"}', index=0),
    ],
    *("calls", "fake", 1, 2),
)
PATHS = {"chat": "/chat/completions", "responses": "/responses", "anthropic": "/messages"}
ANYTHING: list[Any] = [None, -1, "x", [], {}, [1], {"a": 1}, True, 1.5]


def damaged(value: Any) -> Iterator[Any]:
    """The value with each of its parts taken out, and with each replaced by anything else."""
    if not isinstance(value, (dict, list)):
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        copy = value.copy()
        del copy[key]
        yield copy
        for other in [*ANYTHING, *damaged(value[key])]:
            copy = value.copy()
            copy[key] = other
            yield copy


@pytest.mark.parametrize("dialect", list(ADAPTERS))
async def test_an_answer_of_another_form_is_the_model_servers_error(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = WIRES[PATHS[dialect]]
    frames = [json.loads(frame.partition("data: ")[2]) for _, frame in wire.stream(ANSWER) if "[DONE]" not in frame]
    streams = [[*frames[:n], one, *frames[n + 1 :]] for n, frame in enumerate(frames) for one in damaged(frame)]
    answers = [*((True, one) for one in streams), *((False, [one]) for one in damaged(wire.whole(ANSWER)))]
    sent: list[Any] = []

    async def events(*_: Any) -> AsyncIterator[Any]:
        for one in sent:
            yield one

    async def whole(*_: Any) -> Any:
        return sent[0]

    monkeypatch.setattr(Wire, "events", events)
    monkeypatch.setattr(Wire, "json", whole)
    refused = 0
    for stream, answer in answers:
        sent[:] = answer
        try:
            deltas = [one async for one in connect(dialect, "http://127.0.0.1:9/v1").round(asked(stream))]
        except ModelError:
            refused += 1
            continue
        # What the driver does with them: texts are joined, usage is summed.
        assert all(isinstance(one.text, str) for one in deltas if isinstance(one, (TextDelta, ReasoningDelta)))
        assert all(isinstance(one.name + one.arguments, str) for one in deltas if isinstance(one, CallDelta))
        assert min(vars_of(deltas[-1].usage)) >= 0
    assert 100 < refused < len(answers)


def asked(stream: bool) -> ModelRequest:
    return ModelRequest("fake", [{"type": "message", "role": "user", "content": "Hi"}], stream=stream)


def vars_of(usage: Usage) -> list[int]:
    return [getattr(usage, one.name) for one in fields(usage)]


@pytest.mark.parametrize(
    ("dialect", "form"),
    [
        ("chat", {"choices": [{"delta": 7}]}),
        ("responses", {"type": "response.output_text.delta", "delta": 7}),
        ("anthropic", {"type": "content_block_delta", "index": 5, "delta": {"type": "text_delta"}}),
    ],
)
async def test_a_run_with_such_an_answer_says_whose_fault_it_was(
    dialect: str, form: dict[str, Any], make_loop: MakeLoop
) -> None:
    driver, _ = await make_loop([{"text": "some", "finish": "none", "garbage": json.dumps(form)}], dialect)
    run = await driver.start(LoopRequest("fake", "Hello"))
    response = check_stream([event async for event in run.events()])
    assert response is not None
    assert response.status == "failed"
    assert response.error is not None
    assert "the model server's answer is not of its API's form" in response.error.message


CALL_AFTERWARDS: dict[str, dict[str, Any]] = {
    "chat": chunk(call(0, "late", "python", '{"code": "1"}')),
    "responses": {
        "type": "response.output_item.done",
        "output_index": 7,
        "item": {"type": "function_call", "call_id": "late", "name": "python", "arguments": '{"code": "1"}'},
    },
    "anthropic": {
        "type": "content_block_start",
        "index": 7,
        "content_block": {"type": "tool_use", "id": "late", "name": "python", "input": {}},
    },
}


@pytest.mark.parametrize("dialect", list(ADAPTERS))
async def test_a_call_after_the_end_of_an_answer_is_no_part_of_it(
    dialect: str, make_loop: MakeLoop, double: Double
) -> None:
    late = json.dumps(CALL_AFTERWARDS[dialect])
    driver, model = await make_loop([{"text": "It is one.", "garbage": late}, {"text": "never"}], dialect)
    run = await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON]))
    response = check_stream([event async for event in run.events()])
    assert response is not None
    assert response.output_text == "It is one."
    assert [item.type for item in response.output] == ["message"]
    assert not double.host.runs
    assert len(model.requests) == 1


@pytest.mark.parametrize("dialect", list(ADAPTERS))
async def test_calls_in_the_round_without_tools_are_left_out_and_its_text_is_the_answer(
    dialect: str, make_loop: MakeLoop, double: Double
) -> None:
    rounds = [{"calls": [python("1")]}, {"text": "Enough.", "calls": [python("2")]}]
    driver, _ = await make_loop(rounds, dialect)
    run = await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON], limits=Limits(max_rounds=1)))
    response = check_stream([event async for event in run.events()])
    assert response is not None
    assert (response.status, response.output_text) == ("completed", "Enough.")
    assert [args["code"] for _, _, args in double.host.runs] == ["1"]
