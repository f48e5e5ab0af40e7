"""Races, stops and stores that fail: what was shown stays true."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.toolhost.gateway.conftest import Serve, gateway_over
from tests.toolhost.gateway.redis_server import RedisServer
from tests.toolhost.gateway.test_responses import PYTHON, SET
from tests.toolhost.loop.checks import check_items, check_stream
from tests.toolhost.loop.mcp_double import Double
from toolhost.gateway.ledger import StoredRegistry
from toolhost.gateway.stores.sqlite import SqliteStore
from toolhost.loop.ledger import Arrival, Attempt, CallRecord, Ledger, Verdict
from toolhost.loop.tool_client import McpToolServer

PAUSED = {"text": "one two three four", "pause": "gate", "pause_at": 1, "chunk": 4}


async def test_of_children_that_come_at_once_exactly_one_keeps_the_session(serve: Serve) -> None:
    served = await serve([SET, {"text": "set"}, *([{**SET, "when": "child"}, {"text": "x", "when": "child"}] * 5)])
    first: Any = await served.client.responses.create(model="fake", input="root", tools=[PYTHON])
    children: list[Any] = await asyncio.gather(
        *(
            served.client.responses.create(
                model="fake", input=f"child {n}", tools=[PYTHON], previous_response_id=first.id
            )
            for n in range(5)
        )
    )
    containers = [item.container_id for child in children for item in child.output if hasattr(item, "container_id")]
    assert first.output[0].container_id in containers
    kept = {
        child.id
        for child in children
        for item in child.output
        if getattr(item, "container_id", None) == first.output[0].container_id
    }
    assert len(kept) == 1


async def test_a_stop_ends_running_responses_truly_and_keeps_queued_ones(
    tool_server: McpToolServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolhost.gateway.runs.SHUTDOWN_S", 0.1)
    async with gateway_over(tool_server, tmp_path, [PAUSED], max_background=1) as served:
        running = await served.client.responses.create(model="fake", input="1", background=True)
        await served.model.reached("gate")
        queued = await served.client.responses.create(model="fake", input="2", background=True)
        reader = asyncio.create_task(_events(await served.client.responses.retrieve(running.id, stream=True)))
        await asyncio.sleep(0)
        await served.gateway.close()
        events = await reader
        assert events[-1].type == "response.failed"
        check_items(events)
    async with gateway_over(tool_server, tmp_path, [{"text": "second"}], max_background=1) as served:
        assert (await served.client.responses.retrieve(running.id)).status == "failed"
        check_stream(await _events(await served.client.responses.retrieve(queued.id, stream=True)))
        assert (await served.client.responses.retrieve(queued.id)).output_text == "second"


async def test_a_redis_that_dies_in_mid_run_ends_the_stream_as_failed(serve: Serve, tmp_path: Path) -> None:
    from tests.toolhost.gateway import redis_server as module

    if module.PATH is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    redis = RedisServer(tmp_path)
    try:
        served = await serve([PAUSED], store=redis.url)
        stream = aiter(await served.client.responses.create(model="fake", input="Hi", stream=True))
        seen = [await anext(stream)]
        await served.model.reached("gate")
        redis.stop()
        served.model.release("gate")
        async for event in stream:
            seen.append(event)
        assert seen[-1].type == "response.failed"
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        with pytest.raises(openai.InternalServerError) as caught:
            await served.client.responses.retrieve(seen[0].response.id)
        assert caught.value.status_code == 503
    finally:
        redis.stop()


async def test_the_acceptance_table_survives_a_restart(tmp_path: Path) -> None:
    def arrival(content: str) -> Arrival:
        return Arrival("t", 1, "c", "a1", "python.python", "digest", "python", content)

    url = f"sqlite://{tmp_path / 'g.sqlite'}"
    for content, verdict in (("x", Verdict.ACCEPTED), ("x", Verdict.DUPLICATE), ("y", Verdict.CONFLICT)):
        store = SqliteStore(url)
        await store.open()
        ledger = Ledger(StoredRegistry(store, 60))
        if verdict is Verdict.ACCEPTED:
            await ledger.register(
                CallRecord("t", 1, "c", "python.python", "digest", "python", "ann", (Attempt("a1", 1, 2e9),))
            )
        assert await ledger.deliver(arrival(content), 1.0) is verdict
        assert await ledger.usable("t", "c") is (verdict is not Verdict.CONFLICT)
        await store.close()


async def test_half_of_a_surrogate_pair_from_the_model_breaks_nothing(serve: Serve) -> None:
    served = await serve([{"text": "a \ud800 b"}, {"text": "next"}])
    events = await _events(await served.client.responses.create(model="fake", input="Hi", stream=True))
    assert events[-1].type == "response.completed"
    again = await served.http.get(f"/v1/responses/{events[-1].response.id}")
    assert again.json()["output"][0]["content"][0]["text"].startswith("a ")


async def test_a_deleted_running_response_stops_its_model(serve: Serve, double: Double) -> None:
    served = await serve([PAUSED])
    queued = await served.client.responses.create(model="fake", input="Hi", background=True)
    await served.model.reached("gate")
    await served.client.responses.delete(queued.id)
    await served.model.left()
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(queued.id)


async def _events(stream: Any) -> list[Any]:
    return [event async for event in stream]
