"""Every store keeps the contract."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandboxes.stores.base import SharedStore, Store
from sandboxes.stores.memory import MemoryStore
from sandboxes.stores.redis import RedisStore
from sandboxes.stores.sqlite import SqliteStore
from sandboxes.testing.store_suite import SharedStoreSuite, StoreSuite
from tests.toolhost.gateway import redis_server as redis_server_module
from tests.toolhost.gateway.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if redis_server_module.PATH is None:
        pytest.skip("needs redis-server (apt-get install redis-server)")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


def make(name: str, request: pytest.FixtureRequest, directory: Path) -> Store:
    if name == "sqlite":
        return SqliteStore(directory / "ledger.db")
    if name == "memory":
        return MemoryStore()
    server: RedisServer = request.getfixturevalue("redis_server")
    return RedisStore(server.url, prefix=f"{directory.name}:")


@pytest.fixture(params=["sqlite", "memory", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made = make(request.param, request, tmp_path)
    await made.open()
    yield made
    await made.close()


@pytest.fixture(params=["memory", "redis"])
async def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SharedStore]:
    made = make(request.param, request, tmp_path)
    assert isinstance(made, SharedStore)
    await made.open()
    yield made
    await made.close()


class TestStore(StoreSuite):
    """The suite, on each store."""


class TestSharedStore(SharedStoreSuite):
    """What several hosts need, on each store that they can share."""
