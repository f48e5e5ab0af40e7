"""Every store keeps the contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes.stores.base import Store
from sandboxes.stores.memory import MemoryStore
from sandboxes.stores.sqlite import SqliteStore
from sandboxes.testing.store_suite import StoreSuite


@pytest.fixture(params=["sqlite", "memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = SqliteStore(tmp_path / "ledger.db") if request.param == "sqlite" else MemoryStore()
    await made.open()
    yield made
    await made.close()


class TestStore(StoreSuite):
    """The suite, on each store."""
