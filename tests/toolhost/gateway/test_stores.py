"""The contract of a store, run against every one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.toolhost.gateway.redis_server import RedisServer
from toolhost.gateway.stores.base import Append, Check, Conflict, Put, Remove, Store, StoreError
from toolhost.gateway.stores.redis import RedisStore
from toolhost.gateway.stores.sqlite import SqliteStore


@pytest.fixture(params=["sqlite", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store
    if request.param == "sqlite":
        made = SqliteStore(f"sqlite://{tmp_path / 'gateway.sqlite'}")
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        made = RedisStore(server.url, prefix=f"{tmp_path.name}:")
    await made.open()
    yield made
    await made.close()


async def test_a_row_is_what_was_written_with_its_version(store: Store) -> None:
    assert await store.get("a/1") is None
    await store.write(Put("a/1", {"text": "ä \ud800 <|x|>", "n": [1, None]}, 0))
    row = await store.get("a/1")
    assert row is not None
    assert (row.version, row.data) == (1, {"text": "ä \ud800 <|x|>", "n": [1, None]})
    await store.write(Put("a/1", {}, 1))
    assert [row and row.version for row in await store.get_many(["a/1", "a/2"])] == [2, None]


@pytest.mark.parametrize(
    "wrong", [Put("a/1", {}, 0), Put("a/1", {}, 2), Check("a/1", 7), Remove("a/1", 3), Append("a/1", 1, ["x"])]
)
async def test_a_conflict_writes_nothing_of_all_changes(store: Store, wrong: object) -> None:
    await store.write(Put("a/1", {"kept": True}, 0))
    with pytest.raises(Conflict) as caught:
        await store.write(Put("b/1", {}, 0), Append("a/1", 0, ["lost"]), wrong)  # type: ignore[arg-type]
    assert caught.value.key == "a/1"
    assert await store.get("b/1") is None
    assert await store.entries("a/1") == []
    row = await store.get("a/1")
    assert row is not None
    assert row.data == {"kept": True}


async def test_of_many_writers_of_one_version_exactly_one_wins(store: Store) -> None:
    await store.write(Put("a/1", {}, 0))
    results = await asyncio.gather(*(store.write(Put("a/1", {"by": n}, 1)) for n in range(20)), return_exceptions=True)
    assert sum(result is None for result in results) == 1
    assert all(result is None or isinstance(result, Conflict) for result in results)


async def test_a_log_grows_without_gaps_and_goes_with_its_row(store: Store) -> None:
    await store.write(Put("a/1", {}, 0), Append("a/1", 0, ["0", "1"]))
    await store.write(Check("a/1", 1), Append("a/1", 2, ["2 \u2028 ü"]))
    assert await store.entries("a/1", 1) == ["1", "2 \u2028 ü"]
    assert await store.entries("a/1", 0, 2) == ["0", "1"]
    await store.write(Remove("a/1"))
    assert await store.entries("a/1") == []


async def test_a_row_is_due_after_its_time_and_not_when_renewed(store: Store) -> None:
    await store.write(Put("lease/1", {}, 0, due_s=0.001), Put("lease/2", {}, 0, due_s=60), Put("row/1", {}, 0))
    await _until(lambda: store.due())
    assert await store.due() == ["lease/1"]
    await store.write(Put("lease/1", {}, 1, due_s=60))
    assert await store.due() == []


async def test_an_expired_row_is_gone_and_its_place_free(store: Store) -> None:
    await store.write(Put("a/1", {}, 0, ttl_s=0.02), Append("a/1", 0, ["x"]))

    async def gone() -> bool:
        return await store.get("a/1") is None

    await _until(gone)
    await store.write(Put("a/1", {"new": 1}, 0), Append("a/1", 0, ["y"]))
    assert await store.entries("a/1") == ["y"]


async def test_a_watcher_is_woken_by_a_write_of_its_key(store: Store) -> None:
    await store.write(Put("a/1", {}, 0))
    with store.watch("a/1") as changed:
        changed.clear()
        await store.write(Put("a/2", {}, 0), Append("a/1", 0, ["x"]))
        async with asyncio.timeout(10):
            await changed.wait()


async def test_a_cancelled_caller_is_cancelled_and_what_it_began_is_whole(store: Store) -> None:
    number = 0

    async def count() -> None:
        nonlocal number
        while True:
            number += 1
            await store.write(Put(f"a/{number}", {}, 0), Append(f"a/{number}", 0, ["x"]))
            await store.get(f"a/{number}")
            await store.entries(f"a/{number}")
            await store.due()

    for _ in range(200):
        task = asyncio.create_task(count())
        await asyncio.sleep(random.random() * 0.005)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled()

    async def written() -> bool:
        return await store.entries(f"a/{number}") == ["x"]

    number += 1
    task = asyncio.create_task(store.write(Put(f"a/{number}", {}, 0), Append(f"a/{number}", 0, ["x"])))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await _until(written)


@pytest.mark.parametrize("place", ["/proc/self/g.sqlite", "/proc/nothing/g.sqlite"])
async def test_a_place_where_sqlite_cannot_write_is_not_taken_for_another_gateways(place: str) -> None:
    store = SqliteStore(f"sqlite://{place}")
    with pytest.raises(StoreError, match=f"cannot use {place}: No such file or directory"):
        await store.open()
    await store.close()


async def test_sqlite_refuses_a_second_gateway_and_forgives_a_dead_one(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path / 'g.sqlite'}"
    first, second = SqliteStore(url), SqliteStore(url)
    await first.open()
    with pytest.raises(StoreError, match="another gateway"):
        await second.open()
    await second.close()
    await first.write(Put("lease/1", {}, 0, due_s=1000))
    await first.close()
    third = SqliteStore(url)
    await third.open()
    await third.clear_due()
    assert await third.due() == ["lease/1"]
    await third.close()


async def test_a_redis_that_is_gone_is_an_error_that_says_so(redis_server: RedisServer) -> None:
    store = RedisStore("redis://127.0.0.1:1/0")
    with pytest.raises(StoreError, match="Redis cannot be used"):
        await store.open()
    await store.close()


async def _until(condition: object) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # type: ignore[operator]  # noqa: ASYNC110 - the clock of the store has no event
            await asyncio.sleep(0.005)
