"""Plain Python functions as client tools."""

from __future__ import annotations

import pytest

from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.test_scenarios import PYTHON, python
from toolhost.loop.functions import converse, python_tool
from toolhost.loop.request import LoopRequest


def weather(city: str, days: int = 1) -> dict[str, object]:
    """The weather of a city."""
    return {"city": city, "days": days, "sky": "clear"}


async def failing(reason: str) -> str:
    """Fails."""
    raise RuntimeError(reason)


async def test_functions_answer_their_calls_beside_hosted_ones(make_loop: MakeLoop) -> None:
    driver, model = await make_loop(
        [
            {"calls": [{"name": "weather", "arguments": {"city": "Oslo"}}, python("print(7)")]},
            {
                "calls": [
                    {"name": "failing", "arguments": {"reason": "no"}},
                    {"name": "weather", "arguments": {"days": 1}},
                ]
            },
            {"text": "clear"},
        ]
    )
    result = await converse(driver, LoopRequest("fake", "Weather?", tools=[PYTHON]), [weather, failing])
    assert result.response.output_text == "clear"
    said = [message["content"] for message in model.requests[2]["messages"] if message["role"] == "tool"]
    assert said[:3] == ['{"city": "Oslo", "days": 1, "sky": "clear"}', "7\n", "The function failed: RuntimeError: no"]
    assert "The arguments do not fit" in said[3]
    assert "city" in said[3]


async def test_turns_are_bounded_and_what_waits_is_said(make_loop: MakeLoop) -> None:
    rounds = [{"calls": [{"name": "weather", "arguments": {"city": "Oslo"}}], "keep": True}]
    driver, model = await make_loop(rounds)
    result = await converse(driver, LoopRequest("fake", "Weather?"), [weather], max_turns=3)
    assert len(model.requests) == 3
    assert [one.name for one in result.pending] == ["weather"]


def test_signature_and_docstring_describe_the_tool() -> None:
    tool = python_tool(weather).as_tool()
    assert tool["description"] == "The weather of a city."
    assert tool["parameters"]["required"] == ["city"]
    assert tool["parameters"]["properties"]["days"]["default"] == 1


def test_a_parameter_without_a_type_is_refused() -> None:
    def bad(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(TypeError, match="'x' of bad"):
        python_tool(bad)
