"""A call whose result never came: the next turn is told that its outcome is not known, however it hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.toolhost.loop.checks import check_stream
from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.mcp_double import Double, Host, serving
from tests.toolhost.loop.test_control import FILES, events_of
from tests.toolhost.loop.test_scenarios import PYTHON, python
from toolhost.loop.executor import READ_LOST
from toolhost.loop.models.registry import ADAPTERS
from toolhost.loop.request import Limits, LoopRequest
from toolhost.loop.tool_client import Endpoint, McpToolServer
from toolhost.loop.transcript import NO_RESULT, OUTCOME_UNKNOWN

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
DIALECTS = pytest.mark.parametrize("dialect", list(ADAPTERS))
WRITE = {"name": "files_write", "arguments": {"hold": True}}
READ = {"name": "files_read", "arguments": {"hold": True}}


def told(body: dict[str, Any]) -> list[str]:
    """What a request says of its calls' results, in any dialect."""
    found: list[str] = []
    for message in body.get("messages") or body["input"]:
        if message.get("role") == "tool":
            found.append(message["content"])
        elif message.get("type") == "function_call_output":
            found.append(message["output"])
        elif isinstance(message.get("content"), list):
            results = [block for block in message["content"] if block.get("type") == "tool_result"]
            found += ["".join(part["text"] for part in block["content"]) for block in results]
    return found


async def cut_short(
    make_loop: MakeLoop,
    double: Double,
    calls: list[dict[str, Any]],
    dialect: str = "chat",
    stream: bool = True,
    **more: Any,
) -> Any:
    """A run that is cancelled while its calls hold."""
    driver, _ = await make_loop([{"calls": calls}], dialect)
    run = await driver.start(LoopRequest("fake", "Go", tools=[FILES, PYTHON], stream=stream, **more))
    await double.host.started.wait()
    assert run.cancel()
    check_stream(await events_of(run), cancelled=True)
    return await run.result()


@BOTH
@DIALECTS
async def test_a_cancelled_write_is_told_to_the_next_turn_however_it_hears_of_it(
    dialect: str, stream: bool, make_loop: MakeLoop, double: Double
) -> None:
    first = await cut_short(make_loop, double, [WRITE], dialect, stream)
    driver, model = await make_loop([{"text": "I shall look."}, {"text": "I shall look."}], dialect)
    replayed = [
        {"role": "user", "content": "Go"},
        *(one.model_dump(exclude_none=True) for one in first.response.output),
    ]
    for history in (first.transcript, replayed):
        await (await driver.start(LoopRequest("fake", "Well?", history=history, tools=[FILES], stream=stream))).result()
    assert [told(body) for body in model.requests] == [[OUTCOME_UNKNOWN], [OUTCOME_UNKNOWN]]
    assert model.requests[0] == model.requests[1]
    assert first.response.output[-1].status == "incomplete"


@BOTH
@DIALECTS
async def test_a_write_that_died_with_its_server_is_told_in_the_same_words(
    dialect: str, stream: bool, make_loop: MakeLoop
) -> None:
    async with serving(Host(honours_attempts=False)) as double:
        server = await McpToolServer.connect([Endpoint.parse(f"http://{double.at('files')}/mcp")])
        driver, model = await make_loop([{"calls": [WRITE]}, {"text": "Hm."}, {"text": "Hm."}], dialect, tools=server)
        run = await driver.start(LoopRequest("fake", "Go", tools=[FILES], stream=stream))
        await double.host.started.wait()
        await double.kill()
        first = await run.result()
        replayed = [
            {"role": "user", "content": "Go"},
            *(one.model_dump(exclude_none=True) for one in first.response.output),
        ]
        request = LoopRequest("fake", "Well?", history=replayed, tools=[FILES], stream=stream)
        await (await driver.start(request)).result()
    [[said], [again]] = [told(body) for body in model.requests[1:]]
    assert said == again
    assert said.endswith(OUTCOME_UNKNOWN)
    assert len(double.host.runs) == 1


async def test_cancelled_code_is_told_so_whether_outputs_were_asked_for_or_not(
    make_loop: MakeLoop, double: Double
) -> None:
    first = await cut_short(make_loop, double, [python("hold()")])
    [item] = [one for one in first.response.output if one.type == "code_interpreter_call"]
    assert [part.logs for part in item.outputs] == [OUTCOME_UNKNOWN]
    assert first.transcript[-1]["output"] == OUTCOME_UNKNOWN


async def test_a_deadline_tells_it_too_and_what_waited_its_turn_did_not_run(
    make_loop: MakeLoop, double: Double
) -> None:
    driver, _ = await make_loop([{"calls": [WRITE, {"name": "files_write", "arguments": {"n": 2}}]}])
    run = await driver.start(LoopRequest("fake", "Go", tools=[FILES], limits=Limits(deadline=5.0)))
    result = await run.result()
    assert result.why == "deadline"
    outputs = [one["output"] for one in result.transcript if one["type"] == "function_call_output"]
    assert outputs == [OUTCOME_UNKNOWN, NO_RESULT]
    assert len(double.host.runs) == 1


async def test_a_read_that_was_cut_short_may_be_asked_again_and_says_so(make_loop: MakeLoop, double: Double) -> None:
    first = await cut_short(make_loop, double, [READ])
    assert first.transcript[-1]["output"] == READ_LOST


async def test_a_write_that_timed_out_may_have_run(make_loop: MakeLoop, double: Double) -> None:
    driver, model = await make_loop([{"calls": [WRITE]}, {"text": "Hm."}])
    request = LoopRequest("fake", "Go", tools=[FILES], limits=Limits(call_timeout=0.5))
    await (await driver.start(request)).result()
    [said] = told(model.requests[1])
    assert said == f"The call did not end within 0.5 s and was given up. {OUTCOME_UNKNOWN}"


async def test_what_ended_before_the_cancel_keeps_its_result(make_loop: MakeLoop, double: Double) -> None:
    driver, _ = await make_loop([{"calls": [{"name": "files_read", "arguments": {"n": 1}}, WRITE]}])
    run = await driver.start(LoopRequest("fake", "Go", tools=[FILES]))
    async with asyncio.timeout(20):
        while len(double.host.runs) < 2:  # noqa: ASYNC110 - the second call has no event of its own
            await asyncio.sleep(0.01)
    assert run.cancel()
    outputs = [one["output"] for one in (await run.result()).transcript if one["type"] == "function_call_output"]
    assert outputs == ['{"read": {"n": 1}}', OUTCOME_UNKNOWN]


@BOTH
async def test_the_next_generation_knows_what_the_last_one_may_have_done(
    stream: bool, make_loop: MakeLoop, double: Double
) -> None:
    driver, model = await make_loop([{"when": "^Go", "calls": [WRITE]}, {"when": "Stop", "text": "Stopped."}])
    run = await driver.start(LoopRequest("fake", "Go", tools=[FILES], stream=stream))
    await double.host.started.wait()
    assert run.switch("Stop")
    result = await run.result()
    assert result.response.output_text == "Stopped."
    assert told(model.requests[1]) == [OUTCOME_UNKNOWN]


async def test_an_approved_write_that_was_cut_short_is_told_and_its_history_is_kept(
    make_loop: MakeLoop, double: Double
) -> None:
    tools = [{**FILES, "require_approval": "always"}]
    driver, _ = await make_loop([{"calls": [WRITE]}])
    first = await (await driver.start(LoopRequest("fake", "Go", tools=tools))).result()
    yes = {"type": "mcp_approval_response", "approval_request_id": first.pending[0].id, "approve": True}
    run = await driver.start(LoopRequest("fake", [yes], history=first.transcript, tools=tools))
    await double.host.started.wait()
    assert run.cancel()
    second = await run.result()
    assert [one["type"] for one in second.transcript] == ["message", "function_call", "function_call_output"]
    assert second.transcript[-1]["output"] == OUTCOME_UNKNOWN
    assert second.response.output[-1].error.content[0]["text"] == OUTCOME_UNKNOWN


async def test_whoever_takes_over_after_a_crash_has_it_in_the_checkpoint(make_loop: MakeLoop, double: Double) -> None:
    kept: list[list[dict[str, Any]]] = []

    class Keeper:
        async def events(self, events: Sequence[Any]) -> None:
            pass

        async def checkpoint(self, transcript: Sequence[dict[str, Any]]) -> None:
            kept.append(json.loads(json.dumps(transcript)))

    calls = [{"name": "files_write", "arguments": {}}, {"name": "teleport", "arguments": {}}]
    driver, model = await make_loop([{"calls": calls}, {"text": "done"}, {"text": "Hm."}])
    await (await driver.start(LoopRequest("fake", "Go", tools=[FILES]), Keeper())).result()
    await (await driver.start(LoopRequest("fake", "Well?", history=kept[0], tools=[FILES]))).result()
    write, unknown = told(model.requests[2])
    assert write == OUTCOME_UNKNOWN
    assert "There is no tool" in unknown
