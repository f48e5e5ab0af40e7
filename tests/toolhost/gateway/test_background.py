"""Background runs: fetched, followed, resumed from a number, cancelled; and what survives their gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.toolhost.gateway.conftest import Serve, Served
from tests.toolhost.gateway.test_responses import READ, SET
from tests.toolhost.loop.checks import check_response, check_stream
from tests.toolhost.loop.mcp_double import Double
from toolhost.gateway.counts import Counts
from toolhost.gateway.runs import Runs

PYTHON: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}
PAUSED = {"text": "one two three four", "pause": "gate", "pause_at": 1, "chunk": 4}


async def events_of(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def ended(served: Served, ident: str) -> Any:
    """The response once its stream has ended."""
    await events_of(await served.client.responses.retrieve(ident, stream=True))
    return await served.client.responses.retrieve(ident)


async def test_a_background_response_is_queued_runs_and_can_be_fetched(serve: Serve) -> None:
    served = await serve([PAUSED])
    queued = await served.client.responses.create(model="fake", input="Hi", background=True)
    assert queued.status == "queued"
    assert queued.background is True
    await served.model.reached("gate")
    partial = await served.client.responses.retrieve(queued.id)
    assert partial.status == "in_progress"
    assert partial.output_text == "one "
    served.model.release("gate")
    final = await ended(served, queued.id)
    check_response(final)
    assert final.output_text == "one two three four"
    assert final.created_at == queued.created_at


async def test_a_follower_resumes_after_a_number_and_misses_nothing(serve: Serve) -> None:
    served = await serve([PAUSED])
    stream = await served.client.responses.create(model="fake", input="Hi", background=True, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 4:
            break
    await stream.close()
    ident = seen[0].response.id
    served.model.release("gate")
    resumed = await served.client.responses.retrieve(ident, stream=True, starting_after=seen[-1].sequence_number)
    final = check_stream([*seen, *await events_of(resumed)])
    assert final is not None
    assert final.status == "completed"
    replayed = await events_of(await served.client.responses.retrieve(ident, stream=True))
    assert check_stream(replayed) == final


async def test_a_cancel_reaches_the_model_and_the_stream_ends(serve: Serve) -> None:
    served = await serve([PAUSED])
    stream = await served.client.responses.create(model="fake", input="Hi", background=True, stream=True)
    events = aiter(stream)
    first = await anext(events)
    await served.model.reached("gate")
    cancelled = await served.client.responses.cancel(first.response.id)
    assert cancelled.status == "cancelled"
    await served.model.left()
    rest = [event async for event in events]
    check_stream([first, *rest], cancelled=True)
    found = await served.client.responses.retrieve(first.response.id)
    assert found.status == "cancelled"
    assert found.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert found.model_dump() == (await served.client.responses.cancel(found.id)).model_dump()


async def test_a_cancel_reaches_the_running_tool(serve: Serve, double: Double) -> None:
    served = await serve([{"calls": [{"name": "python", "arguments": {"code": "hold()"}}]}, {"text": "late"}])
    queued = await served.client.responses.create(model="fake", input="Hi", tools=[PYTHON], background=True)
    await double.host.started.wait()
    cancelled = await served.client.responses.cancel(queued.id)
    assert cancelled.status == "cancelled"
    double.host.gate.set()
    final = await ended(served, queued.id)
    assert final.status == "cancelled"
    assert [item.status for item in final.output] == ["incomplete"]
    assert len(served.model.requests) == 1


async def test_a_foreground_response_cannot_be_cancelled_and_a_finished_one_stays(serve: Serve) -> None:
    served = await serve([{"text": "a"}, {"text": "b"}])
    foreground = await served.client.responses.create(model="fake", input="Hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        await served.client.responses.cancel(foreground.id)
    background = await served.client.responses.create(model="fake", input="Hi", background=True)
    final = await ended(served, background.id)
    assert final.model_dump() == (await served.client.responses.cancel(background.id)).model_dump()


async def test_beyond_the_bound_responses_wait_and_a_queued_one_can_be_cancelled(serve: Serve) -> None:
    served = await serve([PAUSED, {"text": "second"}], max_background=1)
    first = await served.client.responses.create(model="fake", input="1", background=True)
    await served.model.reached("gate")
    second = await served.client.responses.create(model="fake", input="2", background=True)
    third = await served.client.responses.create(model="fake", input="3", background=True)
    assert (await served.client.responses.retrieve(second.id)).status == "queued"
    cancelled = await served.client.responses.cancel(third.id)
    assert cancelled.status == "cancelled"
    served.model.release("gate")
    assert (await ended(served, first.id)).status == "completed"
    assert (await ended(served, second.id)).output_text == "second"
    assert len(served.model.requests) == 2


async def test_a_background_response_has_to_be_stored(serve: Serve) -> None:
    served = await serve([])
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.responses.create(model="fake", input="Hi", background=True, store=False)
    assert caught.value.param == "background"


async def test_a_background_request_that_cannot_run_is_refused_at_once(serve: Serve) -> None:
    served = await serve([])
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.responses.create(
            model="fake",
            input="Hi",
            background=True,
            tools=[{"type": "mcp", "server_label": "python"}],
            tool_choice={"type": "function", "name": "no"},
        )
    assert caught.value.param == "tool_choice"
    assert not await served.gateway.store.due()


async def test_the_metrics_count_what_ended(serve: Serve) -> None:
    served = await serve([{"text": "ok"}, {"status": 500}])
    for _ in range(2):
        await served.client.responses.create(model="fake", input="Hi")
    lines = (await served.http.get("/metrics")).text.splitlines()
    assert 'toolhost_responses_total{status="completed"} 1.0' in lines
    assert 'toolhost_responses_total{status="failed"} 1.0' in lines
    assert "toolhost_response_seconds_count 2.0" in lines


async def test_a_failing_model_ends_as_failed_and_the_chain_goes_on_from_before(serve: Serve) -> None:
    served = await serve([{"text": "ok"}, {"status": 500}, {"text": "better"}])
    first = await served.client.responses.create(model="fake", input="Hi")
    failed = await served.client.responses.create(model="fake", input="2", previous_response_id=first.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "server_error"
    again = await served.client.responses.create(model="fake", input="2", previous_response_id=first.id)
    assert again.output_text == "better"
    texts = [message["content"] for message in served.model.requests[-1]["messages"]]
    assert texts == ["Hi", "ok", "2"]


async def test_a_response_that_was_cancelled_in_the_queue_can_be_continued(serve: Serve) -> None:
    served = await serve([PAUSED, {"text": "then"}], max_background=1)
    await served.client.responses.create(model="fake", input="1", background=True)
    await served.model.reached("gate")
    queued = await served.client.responses.create(model="fake", input="2", background=True)
    assert (await served.client.responses.cancel(queued.id)).status == "cancelled"
    after = await served.client.responses.create(model="fake", input="3", previous_response_id=queued.id)
    assert after.output_text == "then"
    assert [message["content"] for message in served.model.requests[-1]["messages"]] == ["2", "3"]


async def test_a_turn_stays_when_its_response_that_never_ran_is_deleted(serve: Serve) -> None:
    served = await serve([PAUSED, {"text": "then"}, {"text": "end"}], max_background=1)
    await served.client.responses.create(model="fake", input="1", background=True)
    await served.model.reached("gate")
    queued = await served.client.responses.create(model="fake", input="2", background=True)
    await served.client.responses.cancel(queued.id)
    after = await served.client.responses.create(model="fake", input="3", previous_response_id=queued.id)
    await served.client.responses.delete(queued.id)
    await served.client.responses.create(model="fake", input="4", previous_response_id=after.id)
    assert [message["content"] for message in served.model.requests[-1]["messages"]] == ["2", "3", "then", "4"]


async def test_the_stream_of_a_response_cancelled_in_the_queue_says_what_it_was(serve: Serve) -> None:
    served = await serve([PAUSED], max_background=1)
    first = await served.client.responses.create(model="fake", input="1", background=True)
    await served.model.reached("gate")
    stream = await served.client.responses.create(model="fake", input="2", background=True, stream=True)
    [waiting] = set(served.gateway.runs._running) - {first.id}
    await served.client.responses.cancel(waiting)
    for found in (stream, await served.client.responses.retrieve(waiting, stream=True)):
        [created] = await events_of(found)
        assert (created.type, created.sequence_number) == ("response.created", 0)
        assert (created.response.id, created.response.status) == (waiting, "queued")


async def test_a_stream_in_the_queue_ends_when_another_gateway_cancels(serve: Serve) -> None:
    served = await serve([PAUSED, {"text": "third"}], max_background=1, lease_s=1)
    first = await served.client.responses.create(model="fake", input="1", background=True)
    await served.model.reached("gate")
    stream = await served.client.responses.create(model="fake", input="2", background=True, stream=True)
    runs = served.gateway.runs
    [waiting] = set(runs._running) - {first.id}
    elsewhere = Runs(runs.keep, "gw_other", 1, runs.begin, runs.resume, Counts())  # over the same store
    await elsewhere.cancel(await served.gateway.record(waiting, "anonymous"))
    async with asyncio.timeout(20):
        assert [event.type for event in await events_of(stream)] == ["response.created"]
    third = await served.client.responses.create(model="fake", input="3", background=True)
    served.model.release("gate")
    assert (await ended(served, third.id)).output_text == "third"
    assert len(served.model.requests) == 2


async def test_who_continues_a_failed_response_goes_on_in_its_session(serve: Serve, double: Double) -> None:
    served = await serve([SET, {"status": 500}, READ, {"text": "41"}, READ, {"text": "no x"}])
    failed = await served.client.responses.create(model="fake", input="Set x", tools=[PYTHON])
    assert failed.status == "failed"
    after = await served.client.responses.create(
        model="fake", input="Go on", tools=[PYTHON], previous_response_id=failed.id
    )
    assert after.output_text == "41"
    assert "session" not in str(served.model.requests[2]["messages"])
    assert len({headers["x-toolhost-session"] for headers in double.host.headers}) == 1
    branch = await served.client.responses.create(
        model="fake", input="Again", tools=[PYTHON], previous_response_id=failed.id
    )
    assert branch.output_text == "no x"
    assert "fresh session" in str(served.model.requests[4]["messages"])
    assert len({headers["x-toolhost-session"] for headers in double.host.headers}) == 2
