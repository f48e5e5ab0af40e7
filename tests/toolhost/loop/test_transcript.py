"""Histories in any form: what the model is sent is the same talk, always well paired."""

from __future__ import annotations

from typing import Any

import pytest

from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.mcp_double import Double
from tests.toolhost.loop.test_scenarios import CONTAINER, PYTHON, WEATHER, python
from toolhost.loop.errors import RequestError
from toolhost.loop.models.registry import ADAPTERS
from toolhost.loop.request import LoopRequest
from toolhost.loop.results import excerpt
from toolhost.loop.transcript import NO_RESULT, OUTCOME_UNKNOWN, as_items, model_view, paired, turns


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments}


def output(call_id: str, text: str = "sunny") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def test_items_without_type_id_or_status_are_accepted() -> None:
    items = as_items([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, call("a")])
    assert [turn.role for turn in turns(paired(items))] == ["user", "assistant", "tool"]


def test_an_unanswered_call_gets_an_output_that_says_so() -> None:
    filled = [call("a"), call("b"), output("a", OUTCOME_UNKNOWN), output("b")]
    assert paired([call("a"), call("b"), output("b")]) == filled
    waiting = {**call("a"), "status": "incomplete"}
    assert paired([waiting]) == [waiting, output("a", NO_RESULT)], "one that was not executed is told apart"


def test_an_output_far_from_its_call_is_put_beside_it_once() -> None:
    message = {"type": "message", "role": "user", "content": "well?"}
    items = [call("a"), message, output("a"), output("a", "again")]
    assert paired(items) == [call("a"), output("a"), message]


@pytest.mark.parametrize(
    "items",
    [
        [output("nobody")],
        [{"type": "teleport"}],
        [{"nothing": 1}],
        ["text"],
        [{"role": "user", "content": [{"type": "input_audio"}]}],
    ],
)
async def test_what_cannot_be_said_to_a_model_is_refused_before_anything_starts(
    items: list[Any], make_loop: MakeLoop
) -> None:
    driver, model = await make_loop([{"text": "x"}])
    with pytest.raises(RequestError) as caught:
        await driver.start(LoopRequest("fake", items))
    assert caught.value.param == "input"
    assert not model.requests


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[]", "", "null", "[" * 100_000])
def test_a_broken_call_in_history_never_reaches_a_model(arguments: str) -> None:
    assert paired([call("a", arguments)])[0]["arguments"] == "{}"


@pytest.mark.parametrize("dialect", list(ADAPTERS))
async def test_replayed_items_and_the_kept_transcript_give_the_model_identical_messages(
    dialect: str, make_loop: MakeLoop, double: Double
) -> None:
    tools = [PYTHON, CONTAINER, WEATHER]
    first_rounds: list[dict[str, Any]] = [
        {"calls": [python("print(1)"), {"name": "container_exec", "arguments": {"cmd": "ls"}}]},
        {"calls": [{"name": "teleport", "arguments": {}}]},
        {"text": "Now the weather.", "calls": [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "call_w"}]},
    ]
    driver, _ = await make_loop(first_rounds, dialect)
    include = ["code_interpreter_call.outputs"]
    first = await (await driver.start(LoopRequest("fake", "Go", tools=tools, include=include))).result()
    items = [item.model_dump(exclude_none=True) for item in first.response.output]
    answered = output("call_w")
    sent = []
    for history in (first.transcript, [{"role": "user", "content": "Go"}, *items]):
        driver, model = await make_loop([{"text": "sunny"}], dialect)
        await (await driver.start(LoopRequest("fake", [answered], history=history, tools=tools))).result()
        sent.append(model.requests[0])
    assert sent[0] == sent[1]


def test_hosted_items_are_calls_with_outputs_to_the_model_under_derived_ids() -> None:
    item = {
        "type": "mcp_call",
        "id": "mcp_7",
        "server_label": "files",
        "name": "read",
        "arguments": "{}",
        "output": "x",
    }
    assert model_view([item], {("files", "read"): "files_read"}) == [
        {"type": "function_call", "call_id": "call_7", "name": "files_read", "arguments": "{}"},
        output("call_7", "x"),
    ]


@pytest.mark.parametrize("dialect", list(ADAPTERS))
async def test_instructions_system_messages_and_images_reach_every_upstream(dialect: str, make_loop: MakeLoop) -> None:
    driver, model = await make_loop([{"text": "a cat"}], dialect)
    image = "data:image/png;base64,AAAA"
    content = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": image}]
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": content}]
    await (await driver.start(LoopRequest("fake", items, instructions="Be kind."))).result()
    sent = str(model.requests[0])
    for text in ("Be kind.", "Be brief.", "What is it?", "AAAA"):
        assert sent.count(text) == 1


def test_a_long_output_is_shown_by_head_and_tail_with_the_count_between() -> None:
    text = "a" * 500 + "b" * 500
    shown = excerpt(text, 300)
    assert shown.startswith("a" * 200 + "\n")
    assert shown.endswith("\n" + "b" * 100)
    assert "700 characters left out" in shown
    assert excerpt(text, 1000) == text


async def test_a_long_output_is_whole_in_the_trace_and_an_excerpt_for_the_model(
    make_loop: MakeLoop, double: Double
) -> None:
    driver, model = await make_loop([{"calls": [python("print('y' * 50000)")]}, {"text": "long"}])
    result = await (await driver.start(LoopRequest("fake", "Go", tools=[PYTHON]))).result()
    assert len(model.requests[1]["messages"][-1]["content"]) < 20_100
    [entry] = [entry for entry in result.trace.entries if entry["kind"] == "call"]
    assert len(entry["output"]) == 50_001
