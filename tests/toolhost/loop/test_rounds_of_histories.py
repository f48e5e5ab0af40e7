"""Histories keep their rounds: what a model called together stays together, what it called in turn stays in turn."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.mcp_double import Double
from tests.toolhost.loop.test_scenarios import CONTAINER, PYTHON, WEATHER, python
from toolhost.loop.models.registry import ADAPTERS
from toolhost.loop.request import LoopRequest
from toolhost.loop.transcript import OUTCOME_UNKNOWN, Item, call_suffix, model_view, paired, turns

Round = list[bool]
"""A round's calls: whether each was answered."""
ROUNDS = st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=5)
SAID = st.sampled_from(["", "", "text", "reasoning"])
NAMES = {("files", "read"): "files_read", ("python", "python"): "python"}


def said(kind: str, number: int) -> list[Item]:
    match kind:
        case "text":
            return [{"type": "message", "role": "assistant", "content": f"round {number}"}]
        case "reasoning":
            content = [{"type": "reasoning_text", "text": f"round {number}"}]
            return [{"type": "reasoning", "summary": [], "content": content}]
    return []


def call(number: int, place: int) -> Item:
    call_id = f"call_{call_suffix(f'r{number}', place)}"
    return {"type": "function_call", "call_id": call_id, "name": "files_read", "arguments": "{}"}


def output(one: Item, text: str = "fine") -> Item:
    return {"type": "function_call_output", "call_id": one["call_id"], "output": text}


@given(ROUNDS, st.data())
def test_a_transcript_is_its_own_pairing_but_for_what_nobody_answered(rounds: list[Round], data: st.DataObject) -> None:
    items: list[Item] = []
    expected: list[Item] = []
    for number, answered in enumerate(rounds):
        before = said(data.draw(SAID), number)
        if not any(rounds[number - 1]) and number and not before:
            before = said("text", number)  # nothing tells a round from the one before that has no result at all
        calls = [call(number, place) for place in range(len(answered))]
        items += [*before, *calls, *(output(one) for one, did in zip(calls, answered, strict=True) if did)]
        results = [output(one, "fine" if did else OUTCOME_UNKNOWN) for one, did in zip(calls, answered, strict=True)]
        expected += [*before, *calls, *results]
    assert paired(items) == expected
    assert paired(expected) == expected
    by_turn = [[one.call_id for one in turn.calls] for turn in turns(expected) if turn.calls]
    assert by_turn == [[call(n, place)["call_id"] for place in range(len(one))] for n, one in enumerate(rounds)]


@given(ROUNDS, st.randoms(use_true_random=False))
def test_wherever_its_outputs_are_each_call_has_one_at_the_end_of_its_round(
    rounds: list[Round], rng: random.Random
) -> None:
    items: list[Item] = []
    loose: list[Item] = []
    order: list[str] = []
    for number, answered in enumerate(rounds):
        calls = [call(number, place) for place in range(len(answered))]
        order += [one["call_id"] for one in calls]
        items += [*said("text", number), *calls]
        loose += [output(one) for one in calls]
        rng.shuffle(loose)
        while loose and rng.random() < 0.5:
            items.append(loose.pop())
    result = paired([*items, *loose])
    assert [one["call_id"] for one in result if one["type"] == "function_call"] == order
    ended = [one["call_id"] for one in result if one["type"] == "function_call_output"]
    assert ended == order
    assert paired(result) == result
    assert [len(turn.calls) for turn in turns(result) if turn.calls] == [len(one) for one in rounds]


@given(st.lists(st.lists(st.sampled_from(["code", "mcp"]), min_size=1, max_size=4), min_size=1, max_size=5), st.data())
def test_replayed_items_give_the_rounds_that_made_them(rounds: list[list[str]], data: st.DataObject) -> None:
    replayed: list[Item] = []
    kept: list[Item] = []
    for number, kinds in enumerate(rounds):
        before = said(data.draw(SAID), number)
        calls, results = [], []
        for place, kind in enumerate(kinds):
            suffix = call_suffix(f"r{number}", place)
            calls.append({**call(number, place), "name": "python" if kind == "code" else "files_read"})
            results.append(output(calls[-1], f"result {suffix}"))
            if kind == "code":
                calls[-1]["arguments"] = '{"code": "1"}'
                logs = [{"type": "logs", "logs": f"result {suffix}"}]
                item: Item = {"type": "code_interpreter_call", "id": f"ci_{suffix}", "code": "1", "outputs": logs}
            else:
                item = {"type": "mcp_call", "id": f"mcp_{suffix}", "server_label": "files", "name": "read"}
                item |= {"arguments": "{}", "output": f"result {suffix}"}
            before.append(item)
        replayed += before
        kept += [*(one for one in before if one["type"] in ("message", "reasoning")), *calls, *results]
    assert paired(model_view(replayed, NAMES)) == kept


def test_items_whose_ids_tell_no_round_are_calls_made_in_turn() -> None:
    items = [
        {
            "type": "mcp_call",
            "id": f"mcp_{n}abc",
            "server_label": "files",
            "name": "read",
            "arguments": "{}",
            "output": n,
        }
        for n in "12"
    ]
    assert [item["type"] for item in paired(model_view(items, NAMES))] == ["function_call", "function_call_output"] * 2


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("dialect", list(ADAPTERS))
async def test_two_rounds_without_text_between_stay_two_in_the_next_turn(
    dialect: str, stream: bool, make_loop: MakeLoop, double: Double
) -> None:
    tools = [PYTHON, CONTAINER, WEATHER]
    rounds: list[dict[str, Any]] = [
        {"calls": [python("print(1)"), {"name": "container_exec", "arguments": {"cmd": "ls"}}]},
        {"calls": [python("print(2)")]},
        {"calls": [python("print(3)"), {"name": "weather", "arguments": {"city": "Oslo"}, "id": "call_w"}]},
    ]
    driver, model = await make_loop([*rounds, {"text": "sunny"}, {"text": "sunny"}], dialect)
    include = ["code_interpreter_call.outputs"]
    first = await (await driver.start(LoopRequest("fake", "Go", tools=tools, include=include, stream=stream))).result()
    replayed = [
        {"role": "user", "content": "Go"},
        *(one.model_dump(exclude_none=True) for one in first.response.output),
    ]
    answered = [{"type": "function_call_output", "call_id": "call_w", "output": "sunny"}]
    for history in (first.transcript, replayed):
        request = LoopRequest("fake", answered, history=history, tools=tools, stream=stream)
        await (await driver.start(request)).result()
    assert model.requests[3] == model.requests[4]
    assert calls_by_turn(model.requests[3]) == [2, 1, 2]


def calls_by_turn(body: dict[str, Any]) -> list[int]:
    """How many calls each run of calls in a request has; results end a run."""
    flat: list[str] = []
    for message in body.get("messages") or body["input"]:
        blocks = message["content"] if isinstance(message.get("content"), list) else []
        kinds = [block["type"] for block in blocks if isinstance(block, dict)]
        flat += ["call"] * (len(message.get("tool_calls") or ()) + kinds.count("tool_use"))
        flat += ["call"] if message.get("type") == "function_call" else []
        is_result = message.get("role") == "tool" or message.get("type") == "function_call_output"
        flat += ["result"] if is_result or "tool_result" in kinds else []
    runs: list[int] = []
    for number, kind in enumerate(flat):
        if kind == "call":
            if number and flat[number - 1] == "call":
                runs[-1] += 1
            else:
                runs.append(1)
    return runs
