"""Runs that somebody steers from outside: the streams are valid, and a model that streams and one that does not lead to
equal objects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.toolhost.loop.checks import check_stream
from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.mcp_double import Double
from tests.toolhost.loop.test_control import FILES, events_of
from tests.toolhost.loop.test_scenarios import PYTHON, WEATHER, python
from toolhost.loop.driver import LoopDriver
from toolhost.loop.models.registry import ADAPTERS
from toolhost.loop.request import Limits, LoopRequest, LoopResult

Steered = Callable[[LoopDriver, Double, bool], Awaitable[list[LoopResult]]]

HOLD = {"reasoning": "Hm.", "text": "Let me see.", "calls": [python("hold(); print('once')")]}
ASK = {**FILES, "require_approval": "always"}
WRITE = {"calls": [{"name": "files_write", "arguments": {"n": 1}}]}


def hello(stream: bool, **fields: Any) -> LoopRequest:
    return LoopRequest("fake", **{"input": "Hello", "tools": [PYTHON], "stream": stream, **fields})


async def cancelled(driver: LoopDriver, double: Double, stream: bool) -> list[LoopResult]:
    run = await driver.start(hello(stream))
    await double.host.started.wait()
    assert run.cancel()
    check_stream(await events_of(run), cancelled=True)
    assert (await run.result()).response.status == "cancelled"
    return [await run.result()]


async def out_of_time(driver: LoopDriver, double: Double, stream: bool) -> list[LoopResult]:
    run = await driver.start(hello(stream, limits=Limits(deadline=5.0)))
    check_stream(await events_of(run))
    assert (await run.result()).why == "deadline"
    assert len(double.host.runs) == 1
    return [await run.result()]


async def killed(driver: LoopDriver, double: Double, stream: bool) -> list[LoopResult]:
    run = await driver.start(hello(stream))
    await double.host.started.wait()
    await double.kill()
    await double.start()
    double.host.gate.set()
    response = check_stream(await events_of(run))
    assert response is not None
    assert response.output_text.endswith("done")
    assert len(double.host.runs) == 1
    return [await run.result()]


async def switched(driver: LoopDriver, double: Double, stream: bool) -> list[LoopResult]:
    run = await driver.start(hello(stream))
    await double.host.started.wait()
    assert run.switch("Something else")
    response = check_stream(await events_of(run))
    assert response is not None
    assert response.output_text.endswith("done")
    return [await run.result()]


def answered(approve: bool) -> Steered:
    async def run(driver: LoopDriver, double: Double, stream: bool) -> list[LoopResult]:
        results: list[LoopResult] = []
        request = hello(stream, tools=[ASK])
        for _ in range(2):
            run = await driver.start(request)
            check_stream(await events_of(run))
            results.append(await run.result())
            if results[-1].pending:
                assert not double.host.runs
                [one] = results[-1].pending
                item = {"type": "mcp_approval_response", "approval_request_id": one.id, "approve": approve}
                request = hello(stream, tools=[ASK], history=results[-1].transcript, input=[item])
        assert len(double.host.runs) == int(approve)
        assert [one.why for one in results] == ["approval", "answer"]
        return results

    return run


async def handed_over(driver: LoopDriver, double: Double, stream: bool) -> list[LoopResult]:
    tools = [PYTHON, WEATHER]
    run = await driver.start(hello(stream, tools=tools))
    check_stream(await events_of(run))
    first = await run.result()
    [one] = first.pending
    item = {"type": "function_call_output", "call_id": one.id, "output": "sunny"}
    run = await driver.start(hello(stream, tools=tools, history=first.transcript, input=[item]))
    check_stream(await events_of(run))
    return [first, await run.result()]


SCENES: dict[str, tuple[list[dict[str, Any]], Steered]] = {
    "cancel in mid-call": ([HOLD], cancelled),
    "deadline in mid-call": ([HOLD], out_of_time),
    "tool server killed and restarted in mid-call": ([HOLD, {"text": "done"}], killed),
    "switch in mid-call": ([HOLD, {"text": "done"}], switched),
    "approval yes": ([WRITE, {"text": "done"}], answered(True)),
    "approval no": ([WRITE, {"text": "done"}], answered(False)),
    "client function answered": (
        [{"calls": [python("print(1)"), {"name": "weather", "arguments": {"city": "Oslo"}}]}, {"text": "done"}],
        handed_over,
    ),
}


@pytest.mark.parametrize("dialect", list(ADAPTERS))
@pytest.mark.parametrize("scene", list(SCENES))
async def test_a_steered_run_ends_equally_both_ways(
    scene: str, dialect: str, make_loop: MakeLoop, double: Double
) -> None:
    rounds, steer = SCENES[scene]
    seen = []
    for stream in (True, False):
        double.host.forget()
        double.host.started.clear()
        double.host.gate.clear()
        driver, model = await make_loop(rounds, dialect)
        results = await steer(driver, double, stream)
        asked = [{key: value for key, value in body.items() if "stream" not in key} for body in model.requests]
        seen.append(([(one.response.model_dump(), one.transcript, one.why) for one in results], asked))
    assert seen[0] == seen[1]
