"""Ends that come from outside: cancel, deadline, timeout, a tool server that dies, a consumer that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from tests.toolhost.loop.checks import check_items, check_stream
from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.mcp_double import Double, Host, serving
from tests.toolhost.loop.test_scenarios import PYTHON, SEARCH, python, search
from toolhost.loop.driver import NoTools
from toolhost.loop.errors import RequestError
from toolhost.loop.fake_model import Script
from toolhost.loop.models.base import ModelClient, ModelDelta, ModelRequest
from toolhost.loop.request import Limits, LoopRequest
from toolhost.loop.run import LoopRun
from toolhost.loop.tool_client import Endpoint, McpToolServer
from toolhost.loop.transcript import OUTCOME_UNKNOWN

ROUNDS = [
    {"reasoning": "Let me see.", "calls": [python("print(1)"), search("a")], "chunk": 6},
    {"text": "It is one, and that is all.", "chunk": 6},
]
FILES = {"type": "mcp", "server_label": "files", "require_approval": "never"}


class OneByOne:
    """A model whose fragments come one at a time, however the network bundled them: a cancel comes between any two."""

    dialect = "chat"

    def __init__(self, inner: ModelClient) -> None:
        self._inner = inner

    async def round(self, request: ModelRequest) -> AsyncGenerator[ModelDelta, None]:
        async with aclosing(self._inner.round(request)) as deltas:
            async for delta in deltas:
                yield delta
                for _ in range(20):
                    await asyncio.sleep(0)

    async def aclose(self) -> None:
        await self._inner.aclose()


class CancelAt:
    """An observer that cancels its run at the event of one number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.run: LoopRun | None = None
        self.won = False

    async def events(self, events: Sequence[Any]) -> None:
        for event in events:
            if event.sequence_number == self.number and self.run is not None:
                self.won = self.run.cancel()

    async def checkpoint(self, transcript: Sequence[dict[str, Any]]) -> None:
        pass


async def events_of(run: LoopRun) -> list[Any]:
    return [event async for event in run.events()]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
async def test_cancel_at_each_event_ends_every_item_and_never_both_ways(
    stream: bool, make_loop: MakeLoop, double: Double
) -> None:
    driver, model = await make_loop(ROUNDS)
    driver.model = OneByOne(driver.model)
    request = LoopRequest("fake", "Hello", tools=[PYTHON, SEARCH], stream=stream)
    whole = await events_of(await driver.start(request))
    check_stream(whole)
    lost: list[int] = []
    for number in range(len(whole)):
        double.host.forget()
        model.rounds[:] = Script.validate_python(ROUNDS)
        observer = CancelAt(number)
        run = await driver.start(request, observer)
        observer.run = run
        events = await events_of(run)
        result = await run.result()
        check_stream(events, cancelled=observer.won)
        assert result.response.status == ("cancelled" if observer.won else "completed")
        assert [item.model_dump() for item in result.response.output] == [
            item.model_dump() for item in check_items(events)
        ]
        assert not run.cancel()
        assert not await driver.ledger.current(run.response_id, 1)
        if not observer.won:
            lost.append(number)
            continue
        after = [event.type for event in events[number + 1 :]]
        # What was made at one go with the event is still delivered, and items are ended; the model is not heard again.
        assert sum(kind.endswith("text.delta") for kind in after) <= 1, (number, after)
    # Only an ending that is already there beats a cancel.
    last = max(number for number, event in enumerate(whole) if event.type == "response.output_text.done")
    assert lost == list(range(last, len(whole)))


async def test_cancel_reaches_the_model(make_loop: MakeLoop) -> None:
    driver, model = await make_loop([{"text": "It is one.", "pause": "gate", "pause_at": 1}])
    run = await driver.start(LoopRequest("fake", "Hello"))
    events = []
    async for event in run.events():
        events.append(event)
        if event.type == "response.output_text.delta":
            assert run.cancel()
    async with asyncio.timeout(10):
        await model.left()
    check_stream(events, cancelled=True)
    assert (await run.result()).response.output[0].status == "incomplete"


async def test_cancel_reaches_the_tool(make_loop: MakeLoop, double: Double) -> None:
    driver, _ = await make_loop([{"calls": [python("hold()")]}])
    run = await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON]))
    await double.host.started.wait()
    assert run.cancel()
    async with asyncio.timeout(10):
        await double.host.was_cancelled.wait()
    result = await run.result()
    assert result.response.output[0].status == "incomplete"
    assert double.host.cleaned == [(run.response_id, "python")]
    assert [row["terminal"] for row in result.trace.calls] == ["cancelled"]


async def test_a_second_cancel_disturbs_nothing_that_the_first_one_puts_in_order(
    make_loop: MakeLoop, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = await make_loop([{"calls": [{"name": "files_write", "arguments": {"hold": True}}]}])
    request = LoopRequest("fake", "Hello", tools=[{**FILES, "require_approval": "always"}])
    asked = await (await driver.start(request)).result()
    [one] = asked.pending
    answer = {"type": "mcp_approval_response", "approval_request_id": one.id, "approve": True}
    recording, end = asyncio.Event(), driver.ledger.end

    async def slowly(*call: Any) -> None:
        recording.set()
        await asyncio.sleep(0.1)
        await end(*call)

    monkeypatch.setattr(driver.ledger, "end", slowly)
    run = await driver.start(replace(request, history=asked.transcript, input=[answer]))
    await double.host.started.wait()
    assert run.cancel()
    await recording.wait()
    assert run.cancel()
    assert [row["terminal"] for row in (await run.result()).trace.calls] == ["cancelled"]


async def test_deadline_fails_the_run_and_stops_the_model(make_loop: MakeLoop) -> None:
    driver, model = await make_loop([{"text": "It is one.", "pause": "gate", "pause_at": 1}])
    run = await driver.start(LoopRequest("fake", "Hello", limits=Limits(deadline=0.3)))
    response = check_stream(await events_of(run))
    assert response is not None
    assert response.status == "failed"
    assert response.error is not None
    assert "deadline of 0.3 s" in response.error.message
    async with asyncio.timeout(10):
        await model.left()


async def test_a_call_that_takes_too_long_is_one_timeout_and_the_model_goes_on(
    make_loop: MakeLoop, double: Double
) -> None:
    driver, model = await make_loop([{"calls": [python("hold()")]}, {"text": "Too slow."}])
    limits = Limits(call_timeout=0.2)
    run = await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON], limits=limits))
    response = check_stream(await events_of(run))
    assert response is not None
    assert response.output_text == "Too slow."
    assert "did not end within 0.2 s" in model.requests[1]["messages"][-1]["content"]
    assert [row["terminal"] for row in (await run.result()).trace.calls] == ["timeout"]


async def test_closing_the_generator_cancels_the_run(make_loop: MakeLoop) -> None:
    driver, model = await make_loop([{"text": "It is one.", "pause": "gate", "pause_at": 1}])
    async with aclosing(driver.run(LoopRequest("fake", "Hello"))) as events:
        async for event in events:
            if event.type == "response.in_progress":
                await model.reached("gate")
                break
    async with asyncio.timeout(10):
        await model.left()


async def test_tool_server_killed_in_mid_call_is_joined_again_and_nothing_runs_twice(
    make_loop: MakeLoop, double: Double
) -> None:
    driver, model = await make_loop([{"calls": [python("hold(); print('once')")]}, {"text": "done"}])
    run = await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON]))
    await double.host.started.wait()
    await double.kill()
    await double.start()
    double.host.gate.set()
    response = check_stream(await events_of(run))
    assert response is not None
    assert response.output_text == "done"
    assert len(double.host.runs) == 1
    assert model.requests[1]["messages"][-1]["content"] == "once\n"
    [row] = (await run.result()).trace.calls
    assert [attempt["ended"] for attempt in row["attempts"]] == ["result"]


@pytest.mark.parametrize(("tool", "runs"), [("write", 1), ("read", 2)])
async def test_without_attempt_ids_only_a_read_is_repeated(tool: str, runs: int, make_loop: MakeLoop) -> None:
    async with serving(Host(honours_attempts=False)) as double:
        server = await McpToolServer.connect([Endpoint.parse(f"http://{double.at('files')}/mcp")])
        rounds = [{"calls": [{"name": f"files_{tool}", "arguments": {"hold": True}}]}, {"text": "done"}]
        driver, model = await make_loop(rounds, tools=server)
        run = await driver.start(LoopRequest("fake", "Hello", tools=[FILES]))
        await double.host.started.wait()
        await double.kill()
        double.host.gate.set()
        await double.start()
        response = check_stream(await events_of(run))
        assert response is not None
        assert len(double.host.runs) == runs
        said = model.requests[1]["messages"][-1]["content"]
        [row] = (await run.result()).trace.calls
        if tool == "write":
            assert "not known; it was not repeated" in said
            assert row["terminal"] == "lost"
        else:
            assert said == '{"read": {"hold": true}}'
            assert [attempt["ended"] for attempt in row["attempts"]] == ["lost", "result"]


async def test_model_that_breaks_off_fails_the_run(make_loop: MakeLoop) -> None:
    driver, _ = await make_loop([{"text": "It is one.", "chunk": 3, "break_after": 1}])
    response = check_stream(await events_of(await driver.start(LoopRequest("fake", "Hello"))))
    assert response is not None
    assert response.status == "failed"
    assert response.output[0].status == "incomplete"


async def test_model_that_sends_garbage_fails_the_run(make_loop: MakeLoop) -> None:
    driver, _ = await make_loop([{"text": "It is", "finish": "none", "garbage": "{not json"}])
    response = check_stream(await events_of(await driver.start(LoopRequest("fake", "Hello"))))
    assert response is not None
    assert response.error is not None
    assert "not JSON" in response.error.message


async def test_a_write_is_checkpointed_before_it_runs(make_loop: MakeLoop, double: Double) -> None:
    seen: list[tuple[int, str, str]] = []

    class Recorder:
        async def events(self, events: Sequence[Any]) -> None:
            pass

        async def checkpoint(self, transcript: Sequence[dict[str, Any]]) -> None:
            seen.append((len(double.host.runs), transcript[-2]["name"], transcript[-1]["output"]))

    driver, _ = await make_loop(
        [
            {"calls": [{"name": "files_read", "arguments": {}}]},
            {"calls": [{"name": "files_write", "arguments": {}}]},
            {"text": "done"},
        ]
    )
    run = await driver.start(LoopRequest("fake", "Hello", tools=[FILES]), Recorder())
    await run.result()
    assert seen == [(1, "files_write", OUTCOME_UNKNOWN)], "whoever goes on from there knows that it may have run"


async def test_an_observer_that_fails_ends_the_run_with_its_error(make_loop: MakeLoop) -> None:
    class Broken:
        async def events(self, events: Sequence[Any]) -> None:
            raise OSError("disk full")

        async def checkpoint(self, transcript: Sequence[dict[str, Any]]) -> None:
            pass

    driver, _ = await make_loop([{"text": "x", "pause": "gate"}])
    run = await driver.start(LoopRequest("fake", "Hello"), Broken())
    with pytest.raises(OSError, match="disk full"):
        await run.result()


async def test_a_run_that_another_replica_has_closed_ends_cancelled(make_loop: MakeLoop, double: Double) -> None:
    driver, _ = await make_loop([{"calls": [python("hold()")]}, {"text": "never"}])
    run = await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON]))
    await double.host.started.wait()
    await driver.ledger.close(run.response_id)
    double.host.gate.set()
    events = await events_of(run)
    check_stream(events, cancelled=True)
    assert (await run.result()).response.status == "cancelled"
    assert [row["arrivals"][0]["verdict"] for row in (await run.result()).trace.calls] == ["stale"]


async def test_headers_of_tools_reach_the_server_and_are_not_shown(make_loop: MakeLoop, double: Double) -> None:
    driver, _ = await make_loop([{"calls": [{"name": "files_read", "arguments": {}}]}, {"text": "done"}])
    tool = {**FILES, "headers": {"x-toolhost-session": "secret-key"}, "authorization": "secret-token"}
    run = await driver.start(LoopRequest("fake", "Hello", tools=[tool]))
    events = await events_of(run)
    check_stream(events)
    assert {headers.get("x-toolhost-session") for headers in double.host.headers} == {"secret-key"}
    assert "secret" not in "".join(event.model_dump_json() for event in events)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "teleport"}]}, "tools"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": ""}]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        ({"fields": {"metadata": "none"}}, "metadata"),
    ],
)
async def test_a_bad_request_starts_nothing_and_names_its_parameter(
    fields: dict[str, Any], param: str, make_loop: MakeLoop
) -> None:
    driver, model = await make_loop([{"text": "x"}])
    with pytest.raises(RequestError) as caught:
        await driver.start(LoopRequest("fake", "Hello", **fields))
    assert caught.value.param == param
    assert not model.requests


async def test_a_namespace_that_no_server_has_is_refused(make_loop: MakeLoop) -> None:
    driver, _ = await make_loop([{"text": "x"}], tools=NoTools())
    with pytest.raises(RequestError, match="no tool server has the namespace 'python'"):
        await driver.start(LoopRequest("fake", "Hello", tools=[PYTHON]))


async def test_an_mcp_server_that_is_not_there_is_listed_as_failed_and_the_run_goes_on(make_loop: MakeLoop) -> None:
    driver, _ = await make_loop([{"text": "without it"}])
    missing = {"type": "mcp", "server_label": "elsewhere", "require_approval": "never"}
    run = await driver.start(LoopRequest("fake", "Hello", tools=[missing]))
    response = check_stream(await events_of(run))
    assert response is not None
    assert response.output[0].error == "the server is not there or has no tools"
    assert response.output_text == "without it"
