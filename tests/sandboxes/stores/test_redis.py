"""What is particular to the Redis store: a server that is away, refuses, is full or of a newer schema."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sandboxes.errors import StoreUnavailable
from sandboxes.stores.redis import RedisStore
from sandboxes.testing.store_suite import KEY, attempt_of, record_of, settled
from tests.toolhost.gateway import redis_server as redis_server_module
from tests.toolhost.gateway.redis_server import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    if redis_server_module.PATH is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    made = RedisServer(tmp_path, durable=True)
    yield made
    made.stop()


async def test_a_server_that_is_away_is_named_without_its_password() -> None:
    store = RedisStore("redis://:secret@127.0.0.1:1/0")
    with pytest.raises(
        StoreUnavailable, match=r"127\.0\.0\.1:1 cannot be reached: start it, or mend store\.url"
    ) as caught:
        await store.open()
    assert "secret" not in caught.value.message
    await store.close()


async def test_a_store_that_is_not_open_says_so(server: RedisServer) -> None:
    store = RedisStore(server.url)
    with pytest.raises(StoreUnavailable, match="is not open"):
        await store.get(KEY)
    await store.open()
    await store.close()
    with pytest.raises(StoreUnavailable, match="is not open"):
        await store.get(KEY)


async def test_what_was_committed_is_there_when_the_server_is_back(server: RedisServer) -> None:
    store = RedisStore(server.url)
    await store.open()
    written = await store.put(record_of(), expected_version=None)
    await store.settle(settled(attempt_of("one")))
    server.stop()
    with pytest.raises(StoreUnavailable, match="start it"):
        await store.get(KEY)
    server.start()
    assert await store.get(KEY) == written
    assert await store.attempt(KEY, "one") == settled(attempt_of("one"))
    await store.close()


async def test_wrong_passwords_and_full_servers_are_told_apart(server: RedisServer) -> None:
    admin = Redis.from_url(server.url)
    store = RedisStore(server.url)
    await store.open()
    await admin.config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="is full: give it more memory"):
        await store.put(record_of(), expected_version=None)
    await admin.config_set("maxmemory", "0")
    await admin.config_set("requirepass", "right")
    other = RedisStore(server.url.replace("redis://", "redis://:wrong@"))
    with pytest.raises(StoreUnavailable, match=r"refuses the password or user of store\.url"):
        await other.open()
    await other.close()
    await store.close()
    await admin.aclose()


async def test_a_newer_schema_is_refused(server: RedisServer) -> None:
    admin = Redis.from_url(server.url)
    await admin.set("toolhost:schema", 99)
    store = RedisStore(server.url)
    with pytest.raises(StoreUnavailable, match="newer version"):
        await store.open()
    await store.close()
    await admin.aclose()


async def test_two_prefixes_do_not_meet_and_closing_leaves_no_key_of_a_pruned_session(server: RedisServer) -> None:
    one, two = RedisStore(server.url, "one:"), RedisStore(server.url, "two:")
    await one.open()
    await two.open()
    written = await one.put(record_of(), expected_version=None)
    assert await two.get(KEY) is None
    await one.register(attempt_of("open"))
    await one.settle(settled(attempt_of("one")))
    await one.put_parts(KEY, "browser", {"head": b"1"})
    await one.beat("r", 60, {})
    await one.hold(KEY, "i1", "r", attached=True)
    await one.leave("r")
    await one.put(record_of(phase="closed", closed_at=3.0), expected_version=written.version)
    await one.prune(closed_before=10.0, outcomes_before=10.0)
    admin = Redis.from_url(server.url)
    assert sorted(await admin.keys("*")) == [b"one:schema", b"two:schema"]
    for closing in (one, two, admin):
        await (closing.aclose() if isinstance(closing, Redis) else closing.close())


async def test_a_cancelled_caller_is_cancelled_and_its_write_goes_through(server: RedisServer) -> None:
    store = RedisStore(server.url)
    await store.open()

    async def again() -> None:
        while True:
            await store.put_parts(KEY, "r", {"n": b"1"})

    for _ in range(200):
        task = asyncio.create_task(again())
        await asyncio.sleep(random.random() * 0.005)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled()
    before = await store.parts_version(KEY, "r")
    task = asyncio.create_task(store.put_parts(KEY, "r", {"n": b"2"}))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(10):
        while await store.parts_version(KEY, "r") == before:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
    assert await store.get_parts(KEY, "r") == {"n": b"2"}
    await store.close()


async def test_a_write_that_is_sent_twice_is_one(server: RedisServer) -> None:
    store = RedisStore(server.url)
    await store.open()
    first = await store.put(record_of(), expected_version=None)
    arguments = [str(KEY), "i1", 1, "the write's own mark", "alice", "idle", "-1.0", "", "{}", ""]
    assert await store._run("PUT", *arguments) == b"2"
    assert await store._run("PUT", *arguments) == b"2"  # its answer was lost, and the client library sent it again
    arguments[3] = "another's"
    assert await store._run("PUT", *arguments) == b"conflict"
    assert first.version == 1
    await store.close()
