"""Races, stops and stores that fail: what was shown stays true."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.toolhost.gateway.conftest import Serve, gateway_over
from tests.toolhost.gateway.redis_server import RedisServer
from tests.toolhost.gateway.test_responses import PYTHON, SET
from tests.toolhost.loop.checks import check_items, check_stream
from tests.toolhost.loop.mcp_double import Double
from toolhost.config import GatewaySettings
from toolhost.errors import ConfigurationError
from toolhost.gateway.assembly import assemble
from toolhost.gateway.ledger import StoredRegistry
from toolhost.gateway.run import Run
from toolhost.gateway.schema import CreateResponse
from toolhost.gateway.stores.sqlite import SqliteStore
from toolhost.loop.driver import NoTools
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


async def test_a_redis_that_is_down_at_the_start_is_one_line_and_a_code(tmp_path: Path) -> None:
    from tests.support.host import free_port

    store = f"redis://:secret@127.0.0.1:{free_port()}/0"
    command = [sys.executable, "-m", "toolhost", "gateway", "--listen", f"127.0.0.1:{free_port()}"]
    command += ["--model-url", "http://127.0.0.1:1/v1", "--store", store, "--state-dir", str(tmp_path)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("toolhost: the gateway's Redis cannot be used")
    assert "secret" not in line


def test_a_keys_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "keys"
    settings = GatewaySettings(model_url="http://127.0.0.1:1/v1", keys_file=missing)
    with pytest.raises(ConfigurationError, match="there is no gateway keys file") as caught:
        assemble(settings, tmp_path, NoTools())
    assert not missing.exists()
    command = re.search(r"\(umask 077; .*\)(?=\. Without)", caught.value.message)
    assert command is not None
    subprocess.run(command[0].replace("python", sys.executable, 1), shell=True, check=True)
    assert missing.stat().st_mode & 0o077 == 0
    assemble(settings, tmp_path, NoTools())


def test_without_one_the_state_directory_has_the_keys(tmp_path: Path) -> None:
    assemble(GatewaySettings(model_url="http://127.0.0.1:1/v1"), tmp_path / "new", NoTools())
    assert (tmp_path / "new" / "gateway.keys").stat().st_mode & 0o777 == 0o600


async def test_a_redis_that_comes_back_is_used_again(serve: Serve, tmp_path: Path) -> None:
    from tests.toolhost.gateway import redis_server as module

    if module.PATH is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    redis = RedisServer(tmp_path)
    try:
        served = await serve([{"text": "a"}, {"text": "b"}], store=redis.url)
        assert (await served.client.responses.create(model="fake", input="1")).output_text == "a"
        redis.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            await served.client.responses.create(model="fake", input="2")
        assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
        redis.start()
        assert (await served.client.responses.create(model="fake", input="3")).output_text == "b"
    finally:
        redis.stop()


async def test_a_full_disk_is_told_ends_what_runs_and_is_got_over(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[sqlite3.Connection] = []
    connect = SqliteStore._connect

    def limited(store: SqliteStore) -> sqlite3.Connection:
        connections.append(connect(store))
        return connections[-1]

    monkeypatch.setattr(SqliteStore, "_connect", limited)
    served = await serve([PAUSED, {"text": "after"}])
    stream = aiter(await served.client.responses.create(model="fake", input="Hi", stream=True))
    seen = [await anext(stream)]
    await served.model.reached("gate")

    def pages(session: Any, count: int) -> int:
        return int(session.read(f"PRAGMA max_page_count = {count}").fetchone()[0])

    store: Any = served.gateway.store
    full = await store._do(lambda session: pages(session, 1))  # no page more than there are
    large = {"model": "fake", "input": "x" * 200_000}
    refused = await served.http.post("/v1/responses", json=large)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert "full" in refused.json()["error"]["message"]
    served.model.release("gate")
    seen += [event async for event in stream]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type in ("response.failed", "response.completed")

    await store._do(lambda session: pages(session, full + 100_000))
    assert (await served.client.responses.create(model="fake", input="Again")).output_text == "after"
    found = await served.client.responses.retrieve(seen[0].response.id)
    assert found.status in ("in_progress", seen[-1].response.status)  # the reconciler closes it when its lease is due


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


async def test_more_than_a_hundred_responses_are_with_the_model_at_once(serve: Serve) -> None:
    served = await serve([{**PAUSED, "keep": True}])
    body = CreateResponse(model="fake", input="Hi")
    runs = [await served.gateway.create(body, "ann") for _ in range(120)]
    async with asyncio.timeout(60):
        while len(served.model.requests) < len(runs):  # noqa: ASYNC110 - the model has no event for it
            await asyncio.sleep(0.01)
    served.model.release("gate")
    ends = await asyncio.gather(*(run.done for run in runs))
    assert {one["status"] for one in ends} == {"completed"}


async def test_the_events_of_many_streams_at_once_are_whole_and_stored_before_they_are_shown(serve: Serve) -> None:
    served = await serve([{"text": "a b c d e f g h i j", "chunk": 2, "delay": 0.001, "keep": True}])
    body = CreateResponse(model="fake", input="Hi")
    runs = [await served.gateway.create(body, "ann") for _ in range(20)]

    async def follow(run: Run) -> list[str]:
        seen: list[str] = []
        async for line in run.feed.read():
            seen.append(line)
            if len(seen) % 5 == 0:
                assert len(await served.gateway.store.entries(f"response/{run.id}")) >= len(seen)
        return seen

    for run, seen in zip(runs, await asyncio.gather(*map(follow, runs)), strict=True):
        assert seen == await served.gateway.store.entries(f"response/{run.id}")
        numbers = [json.loads(line.partition(" ")[2])["sequence_number"] for line in seen]
        assert numbers == list(range(len(seen)))
        assert seen[-1].startswith("response.completed ")


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
