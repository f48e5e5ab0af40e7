"""Two gateways on one Redis: create on one, follow and cancel on the other; one dies, the other tells the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.toolhost.gateway import redis_server as redis_module
from tests.toolhost.gateway.processes import GatewayProcess
from tests.toolhost.gateway.redis_server import RedisServer
from tests.toolhost.loop.checks import check_stream
from tests.toolhost.loop.mcp_double import Double, serving
from toolhost.loop import fake_model

LEASE_S = 1.5
PYTHON: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}
PAUSED = {"text": "one two three four", "pause": "gate", "pause_at": 1, "chunk": 4}


class Replicas:
    """Gateways, a client of each, and what they share."""

    def __init__(self, model: fake_model.FakeModel, double: Double, gateways: list[GatewayProcess]) -> None:
        self.model = model
        self.double = double
        self.gateways = gateways
        self.clients = [openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) for one in gateways]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    if redis_module.PATH is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as entered:
        yield entered


async def start(stack: AsyncExitStack, redis: RedisServer, tmp_path: Path, rounds: list[dict[str, Any]]) -> Replicas:
    model, url = await stack.enter_async_context(fake_model.serving(rounds))
    double = await stack.enter_async_context(serving())
    tools = ",".join([double.at("python"), f"http://{double.at('files')}/mcp"])
    gateways = [
        GatewayProcess(
            tmp_path,
            name,
            "--model-url",
            url,
            "--tools",
            tools,
            "--store",
            redis.url,
            TOOLHOST_GATEWAY__LEASE_S=str(LEASE_S),
        )
        for name in ("a", "b")
    ]
    for gateway in gateways:
        stack.callback(gateway.stop)
        await asyncio.to_thread(gateway.start)
    replicas = Replicas(model, double, gateways)
    for client in replicas.clients:
        stack.push_async_callback(client.close)
    return replicas


async def events_of(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_one_creates_the_other_follows_and_cancels(
    stack: AsyncExitStack, redis: RedisServer, tmp_path: Path
) -> None:
    pair = await start(stack, redis, tmp_path, [PAUSED, {**PAUSED, "pause": "second"}])
    a, b = pair.clients
    queued = await a.responses.create(model="fake", input="Hi", background=True)
    await pair.model.reached("gate")
    follower = asyncio.create_task(events_of(await b.responses.retrieve(queued.id, stream=True)))
    pair.model.release("gate")
    followed = await follower
    final = check_stream(followed)
    assert final is not None
    assert final.output_text == "one two three four"
    resumed = await events_of(await b.responses.retrieve(queued.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in resumed] == [event.sequence_number for event in followed][4:]

    queued = await a.responses.create(model="fake", input="Hi", background=True)
    await pair.model.reached("second")
    cancelled = await b.responses.cancel(queued.id)
    assert cancelled.status == "cancelled"
    await pair.model.left()
    for client in pair.clients:
        check_stream(await events_of(await client.responses.retrieve(queued.id, stream=True)), cancelled=True)
        assert (await client.responses.retrieve(queued.id)).status == "cancelled"


async def test_a_killed_gateways_responses_are_closed_truly_by_the_other(
    stack: AsyncExitStack, redis: RedisServer, tmp_path: Path
) -> None:
    call = {"calls": [{"name": "python", "arguments": {"code": "hold()"}}]}
    pair = await start(stack, redis, tmp_path, [call])
    a, b = pair.clients
    queued = await a.responses.create(model="fake", input="Hi", tools=[PYTHON], background=True)
    await pair.double.host.started.wait()
    pair.gateways[0].kill()
    events = await events_of(await b.responses.retrieve(queued.id, stream=True))
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.failed"
    assert final.output[0].status == "incomplete"
    found = await b.responses.retrieve(queued.id)
    assert found.status == "failed"
    assert found.error is not None
    assert "stopped" in found.error.message
    assert len(pair.double.host.runs) == 1
    trace = await b.get(f"/responses/{queued.id}/input_items", cast_to=object)
    assert trace


async def test_a_response_that_was_only_queued_is_begun_by_the_other(
    stack: AsyncExitStack, redis: RedisServer, tmp_path: Path
) -> None:
    model, url = await stack.enter_async_context(fake_model.serving([PAUSED, {"text": "second", "when": "2"}]))
    environment = {"TOOLHOST_GATEWAY__LEASE_S": str(LEASE_S), "TOOLHOST_GATEWAY__MAX_BACKGROUND": "1"}
    arguments = ("--model-url", url, "--store", redis.url)
    first, second = (GatewayProcess(tmp_path, name, *arguments, **environment) for name in ("a", "b"))
    for gateway in (first, second):
        stack.callback(gateway.stop)
        await asyncio.to_thread(gateway.start)
    async with (
        openai.AsyncOpenAI(base_url=f"{first.url}/v1", api_key="none") as a,
        openai.AsyncOpenAI(base_url=f"{second.url}/v1", api_key="none") as b,
    ):
        running = await a.responses.create(model="fake", input="1", background=True)
        await model.reached("gate")
        queued = await a.responses.create(model="fake", input="2", background=True)
        first.kill()
        check_stream(await events_of(await b.responses.retrieve(queued.id, stream=True)))
        found = await b.responses.retrieve(queued.id)
        assert found.status == "completed"
        assert found.output_text == "second"
        await events_of(await b.responses.retrieve(running.id, stream=True))
        assert (await b.responses.retrieve(running.id)).status == "failed"


async def test_a_call_that_was_about_to_run_is_on_record_after_the_kill(
    stack: AsyncExitStack, redis: RedisServer, tmp_path: Path
) -> None:
    call = {"calls": [{"name": "files_write", "arguments": {"hold": True}}]}
    pair = await start(stack, redis, tmp_path, [call, {"text": "what happened"}])
    a, b = pair.clients
    files: Any = {"type": "mcp", "server_label": "files"}
    queued = await a.responses.create(model="fake", input="Write", tools=[files], background=True)
    await pair.double.host.started.wait()
    pair.gateways[0].kill()
    await events_of(await b.responses.retrieve(queued.id, stream=True))
    after = await b.responses.create(model="fake", input="Well?", tools=[files], previous_response_id=queued.id)
    assert after.output_text == "what happened"
    messages = pair.model.requests[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "files_write"
    assert len(pair.double.host.runs) == 1
