"""Scripted runs over a real socket to the model and to the tools: each stream is valid, and both ways of asking agree.

Every scenario runs in each dialect, with the model streaming and not; the final objects must be equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.toolhost.loop.checks import check_stream
from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.mcp_double import Double
from toolhost.loop.fake_model import FakeModel
from toolhost.loop.hooks import Refuse
from toolhost.loop.models.registry import ADAPTERS
from toolhost.loop.request import Limits, LoopRequest, LoopResult

PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}
SEARCH = {"type": "web_search"}
CONTAINER = {"type": "mcp", "server_label": "container", "require_approval": "never"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def python(code: str) -> dict[str, Any]:
    return {"name": "python", "arguments": {"code": code}}


def search(query: str) -> dict[str, Any]:
    return {"name": "browser_search", "arguments": {"query": query}}


Seen = tuple[LoopResult, FakeModel, Double]


@dataclass
class Scenario:
    rounds: list[dict[str, Any]]
    expect: Callable[[LoopResult, FakeModel, Double], None]
    tools: list[dict[str, Any]] = field(default_factory=lambda: [PYTHON, SEARCH])
    request: dict[str, Any] = field(default_factory=dict)
    driver: dict[str, Any] = field(default_factory=dict)
    dialects: tuple[str, ...] = tuple(ADAPTERS)
    half_a_stream: bool = False
    """The stream ends before it tells the usage."""


def kinds(result: LoopResult) -> list[str]:
    return [item.type for item in result.response.output]


def statuses(result: LoopResult) -> list[str | None]:
    return [getattr(item, "status", None) for item in result.response.output]


def outputs(result: LoopResult) -> list[str]:
    return [item["output"] for item in result.transcript if item["type"] == "function_call_output"]


def expect_text(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "completed"
    assert kinds(result) == ["reasoning", "message"]
    assert result.response.output_text == "The answer is 42."
    assert result.why == "answer"
    assert not double.host.runs
    assert result.response.usage is not None
    assert result.response.usage.input_tokens == 10


def expect_one_call(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert kinds(result) == ["code_interpreter_call", "message"]
    code = result.response.output[0]
    assert code.code == "print(6 * 7)"
    assert code.container_id == result.response.id
    assert [part.logs for part in code.outputs] == ["42\n"]
    assert double.host.cleaned == [(result.response.id, "python")]
    assert result.response.usage is not None
    assert result.response.usage.total_tokens == 30


def expect_five(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert statuses(result) == ["completed"] * 6
    assert outputs(result) == ["0\n", '{"search": {"query": "meet"}}', "1\n", '{"search": {"query": "b"}}', "2\n"]
    assert [args["code"] for name, _, args in double.host.runs if name == "python"] == [
        "n = 0; print(n)  # meet",
        "n += 1; print(n)",
        "n += 1; print(n)",
    ]
    assert double.host.met.is_set()


def expect_ten(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert len(double.host.runs) == 10
    assert len({item["call_id"] for item in result.transcript if item["type"] == "function_call"}) == 10
    assert result.response.output_text == "done"
    assert result.response.usage is not None
    assert result.response.usage.input_tokens == 110


def expect_hallucinated(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "completed"
    assert kinds(result) == ["mcp_call", "mcp_call", "message"]
    assert statuses(result)[:2] == ["failed", "failed"]
    assert "There is no tool 'teleport'. The tools are: python, browser_search, browser_open." in outputs(result)[0]
    assert not double.host.runs


def expect_unbounded_hallucination(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "failed"
    assert result.response.error is not None
    assert "teleport" in result.response.error.message
    assert len(model.requests) == 3


def expect_broken(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert kinds(result) == ["code_interpreter_call", "mcp_call", "message"]
    assert statuses(result)[:2] == ["incomplete", "incomplete"]
    assert "not valid JSON" in outputs(result)[0]
    assert not double.host.runs
    assert '{"code": "pri' not in json.dumps(
        model.requests[-1]["messages" if "messages" in model.requests[-1] else "input"][1]
    )


def expect_required(result: LoopResult, model: FakeModel, double: Double) -> None:
    choices = [body.get("tool_choice") for body in model.requests]
    assert choices in (["required", "auto"], [{"type": "any"}, {"type": "auto"}])
    assert result.response.tool_choice == "required"


def expect_call_limit(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert len(double.host.runs) == 2
    assert result.response.status == "completed"
    assert "limit of 2 tool calls" in outputs(result)[2]
    assert not model.requests[-1].get("tools")
    assert result.response.max_tool_calls == 2


def expect_token_limit(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "incomplete"
    assert result.response.incomplete_details is not None
    assert result.response.incomplete_details.reason == "max_output_tokens"
    assert statuses(result) == ["completed", "incomplete"]
    asked = [body.get("max_tokens") or body.get("max_output_tokens") for body in model.requests]
    assert asked == [12, 7]


def expect_round_limit(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "completed"
    assert result.response.output_text == "enough"
    assert not model.requests[-1].get("tools")
    assert len(model.requests) == 3


def expect_round_limit_missed(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "incomplete"
    assert result.why == "round_limit"
    assert len(double.host.runs) == 1


def expect_client_and_hosted(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "completed"
    assert kinds(result) == ["function_call", "code_interpreter_call"]
    assert [(one.kind, one.name, one.arguments) for one in result.pending] == [
        ("function_call", "weather", '{"city": "Oslo"}')
    ]
    assert outputs(result) == ["1\n"]
    assert len(model.requests) == 1


def expect_unknown_beside_client(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert [one.name for one in result.pending] == ["weather"]
    assert kinds(result) == ["mcp_call", "function_call"]
    assert not double.host.runs


def expect_refusal(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "completed"
    assert result.why == "refusal"
    message = result.response.output[0]
    assert [part.type for part in message.content] == ["output_text", "refusal"]
    assert message.content[0].text == "a" * 200
    assert message.content[1].refusal == "not that"
    assert "secret" not in result.response.model_dump_json()
    assert not double.host.runs


def expect_input_refusal(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.output[0].content[0].refusal == "no"
    assert not model.requests


def expect_filter(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "incomplete"
    assert result.response.incomplete_details is not None
    assert result.response.incomplete_details.reason == "content_filter"


def expect_truncated(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "incomplete"
    assert result.why == "truncated"
    assert statuses(result) == ["incomplete"]


def expect_cut_call(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "incomplete"
    assert statuses(result) == ["incomplete"]
    assert not double.host.runs


def expect_model_error(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert result.response.status == "failed"
    assert result.response.error is not None
    assert result.response.error.code == "rate_limit_exceeded"
    assert "slow down" in result.response.error.message


def expect_one_of_two(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert [args["code"] for _, _, args in double.host.runs] == ["print(1)"]
    assert kinds(result) == ["code_interpreter_call", "message"]


def expect_mcp(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert kinds(result) == ["mcp_list_tools", "mcp_call", "message"]
    call = result.response.output[1]
    assert (call.server_label, call.name, call.status) == ("container", "exec", "completed")
    assert call.output == '{"exec": {"cmd": ["ls"]}}'
    assert [tool.name for tool in result.response.output[0].tools] == ["exec"]


def expect_aliases(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert [(namespace, name) for namespace, name, _ in double.host.runs].count(("browser", "search")) == 3
    assert [(namespace, name) for namespace, name, _ in double.host.runs].count(("python", "python")) == 1
    assert statuses(result) == ["completed"] * 5


def expect_empty(result: LoopResult, model: FakeModel, double: Double) -> None:
    assert kinds(result) == ["message"]
    assert result.response.status == "completed"
    assert result.response.output_text == ""


def no_secrets(text: str) -> Refuse | None:
    return Refuse("not that") if "secret" in text else None


async def no_input(text: str) -> Refuse | None:
    return Refuse("no") if "Hello" in text else None


SCENARIOS: dict[str, Scenario] = {
    "text": Scenario([{"reasoning": "Six by seven.", "text": "The answer is 42."}], expect_text),
    "one call": Scenario(
        [{"calls": [python("print(6 * 7)")]}, {"text": "42"}],
        expect_one_call,
        request={"include": ["code_interpreter_call.outputs"]},
    ),
    "five parallel calls over two namespaces": Scenario(
        [
            {
                "calls": [
                    python("n = 0; print(n)  # meet"),
                    search("meet"),
                    python("n += 1; print(n)"),
                    search("b"),
                    python("n += 1; print(n)"),
                ],
                "interleave": True,
                "chunk": 3,
            },
            {"text": "done"},
        ],
        expect_five,
    ),
    "ten rounds": Scenario([*({"calls": [python(f"print({n})")]} for n in range(10)), {"text": "done"}], expect_ten),
    "hallucinated name": Scenario(
        [{"calls": [{"name": "teleport", "arguments": {}}]}, {"calls": [{"name": "teleport"}]}, {"text": "sorry"}],
        expect_hallucinated,
    ),
    "hallucinated name for ever": Scenario(
        [{"calls": [{"name": "teleport", "arguments": {"n": n}}]} for n in range(5)], expect_unbounded_hallucination
    ),
    "broken JSON": Scenario(
        [
            {
                "calls": [
                    {"name": "python", "arguments": '{"code": "pri'},
                    {"name": "browser_search", "arguments": '["not an object"]'},
                ]
            },
            {"text": "sorry"},
        ],
        expect_broken,
        dialects=("chat", "responses"),  # the third has no whole object to break: its arguments are parsed there
    ),
    "tool_choice required": Scenario(
        [{"calls": [python("1")]}, {"text": "done"}], expect_required, request={"tool_choice": "required"}
    ),
    "max_tool_calls": Scenario(
        [{"calls": [python("1"), search("a"), python("2")]}, {"text": "done"}],
        expect_call_limit,
        request={"limits": Limits(max_tool_calls=2)},
    ),
    "max_output_tokens": Scenario(
        [{"calls": [python("1")]}, {"text": "and so on and", "finish": "length", "output_tokens": 7}],
        expect_token_limit,
        request={"limits": Limits(max_output_tokens=12)},
    ),
    "round limit": Scenario(
        [{"calls": [python("1")]}, {"calls": [python("2")]}, {"text": "enough"}],
        expect_round_limit,
        request={"limits": Limits(max_rounds=2)},
    ),
    "round limit missed": Scenario(
        [{"calls": [python("1")]}, {"calls": [python("2")]}],
        expect_round_limit_missed,
        request={"limits": Limits(max_rounds=1)},
    ),
    "client function with a hosted call": Scenario(
        [{"calls": [{"name": "weather", "arguments": {"city": "Oslo"}}, python("print(1)")]}],
        expect_client_and_hosted,
        tools=[PYTHON, WEATHER],
    ),
    "unknown name beside a client function": Scenario(
        [{"calls": [{"name": "teleport", "arguments": {}}, {"name": "weather", "arguments": {"city": "Rome"}}]}],
        expect_unknown_beside_client,
        tools=[PYTHON, WEATHER],
    ),
    "refusal by the output hook": Scenario(
        [{"text": "a" * 200 + "the secret" + "b" * 300, "calls": [python("print(1)")], "chunk": 50}],
        expect_refusal,
        driver={"check_output": no_secrets},
    ),
    "refusal by the input hook": Scenario([{"text": "x"}], expect_input_refusal, driver={"check_input": no_input}),
    "content filter": Scenario([{"text": "some", "finish": "filter"}], expect_filter),
    "stream without an end": Scenario(
        [{"text": "some", "finish": "none"}], expect_truncated, dialects=("chat", "anthropic"), half_a_stream=True
    ),
    "call cut off by the token limit": Scenario(
        [{"calls": [{"name": "python", "arguments": '{"code": "print(1)"}'}], "finish": "length"}], expect_cut_call
    ),
    "model refuses the request": Scenario([{"status": 429, "text": "slow down"}], expect_model_error),
    "parallel_tool_calls false": Scenario(
        [{"calls": [python("print(1)"), python("print(2)")]}, {"text": "done"}],
        expect_one_of_two,
        request={"parallel_tool_calls": False},
    ),
    "a namespace without a kind of its own": Scenario(
        [{"calls": [{"name": "container_exec", "arguments": {"cmd": ["ls"]}}]}, {"text": "done"}],
        expect_mcp,
        tools=[CONTAINER],
    ),
    "aliases of names": Scenario(
        [
            {
                "calls": [
                    {"name": "functions.browser.search", "arguments": {"query": "a"}},
                    {"name": "browser.search", "arguments": {"query": "b"}},
                    {"name": "search<|channel|>commentary", "arguments": {"query": "c"}},
                    {"name": "code_interpreter", "arguments": {"code": "1"}},
                ]
            },
            {"text": "done"},
        ],
        expect_aliases,
    ),
    "an empty answer": Scenario([{"text": ""}], expect_empty),
}


def without_usage(result: tuple[dict[str, Any], Any, str]) -> tuple[dict[str, Any], Any, str]:
    return {**result[0], "usage": None}, result[1], result[2]


CASES = [
    pytest.param(scenario, dialect, id=f"{name} in {dialect}")
    for name, scenario in SCENARIOS.items()
    for dialect in scenario.dialects
]


@pytest.mark.parametrize(("scenario", "dialect"), CASES)
async def test_stream_is_valid_and_both_ways_of_asking_give_equal_objects(
    scenario: Scenario, dialect: str, make_loop: MakeLoop, double: Double
) -> None:
    objects = []
    for stream in (True, False):
        double.host.forget()
        driver, model = await make_loop(scenario.rounds, dialect, **scenario.driver)
        request = LoopRequest("fake", "Hello", tools=scenario.tools, stream=stream, **scenario.request)
        run = await driver.start(request)
        events = [event async for event in run.events()]
        result = await run.result()
        final = check_stream(events)
        assert final == result.response
        scenario.expect(result, model, double)
        objects.append((result.response.model_dump(), result.transcript, result.why))
    assert without_usage(objects[0]) == without_usage(objects[1])
    assert scenario.half_a_stream or objects[0] == objects[1]


@pytest.mark.parametrize("name", ["one call", "five parallel calls over two namespaces", "hallucinated name"])
async def test_one_script_in_three_dialects_gives_one_transcript(
    name: str, make_loop: MakeLoop, double: Double
) -> None:
    scenario = SCENARIOS[name]
    transcripts = []
    for dialect in ADAPTERS:
        double.host.forget()
        driver, _ = await make_loop([{"reasoning": "Hm."} | scenario.rounds[0], *scenario.rounds[1:]], dialect)
        run = await driver.start(LoopRequest("fake", "Hello", tools=scenario.tools))
        result = await run.result()
        plain = [{key: value for key, value in item.items() if key != "replay"} for item in result.transcript]
        transcripts.append((plain, result.response.model_dump()))
    for other in transcripts[1:]:
        assert other[0] == transcripts[0][0]
        assert other[1] == transcripts[0][1]


async def test_reasoning_goes_back_in_the_form_that_each_upstream_wants(make_loop: MakeLoop) -> None:
    rounds = [{"reasoning": "Hm.", "calls": [python("1")]}, {"text": "done"}]
    seen = {}
    for dialect in ADAPTERS:
        driver, model = await make_loop(rounds, dialect)
        await (await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON]))).result()
        seen[dialect] = model.requests[1]
    assert seen["chat"]["messages"][1]["reasoning_content"] == "Hm."
    assert seen["responses"]["input"][1]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert seen["anthropic"]["messages"][1]["content"][0] == {
        "type": "thinking",
        "thinking": "Hm.",
        "signature": "signed",
    }
