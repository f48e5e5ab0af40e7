"""The backends and stores that the contract suites run on."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

pytest.register_assert_rewrite("sandboxes.testing.backend_suite", "sandboxes.testing.store_suite")

from sandboxes.backends.base import Backend  # noqa: E402
from sandboxes.owner import Owner  # noqa: E402
from sandboxes.stores.sqlite import SqliteStore  # noqa: E402
from sandboxes.testing.fake_backend import FakeBackend, FakeEngine  # noqa: E402
from sandboxes.testing.host import SuiteHost  # noqa: E402
from tests.sandboxes.backends import bubblewrap_host  # noqa: E402

GRACE_S = 0.3


def fake(directory: Path) -> SuiteHost:
    engine = FakeEngine()

    def leftovers() -> list[str]:
        return sorted([*engine.sandboxes, *engine.workspaces])

    return _host(directory, lambda owner: FakeBackend(owner, engine), leftovers)


def bubblewrap(directory: Path) -> SuiteHost:
    place = bubblewrap_host.Host.make(directory, os.geteuid())
    host = _host(place.state, lambda owner: place.backend(owner=owner, grace_s=GRACE_S), place.leftovers)
    host.spec = bubblewrap_host.SMALL
    return host


def _host(state: Path, backend: Callable[[Owner], Backend], leftovers: Callable[[], list[str]]) -> SuiteHost:
    return SuiteHost(
        backend=backend,
        store=lambda: SqliteStore(state / "ledger.db"),
        owner=Owner.load(state),
        stranger=Owner("0123456789abcdef", b"s" * 32),
        leftovers=leftovers,
        state=state,
        grace_s=GRACE_S,
    )


HOSTS = {"fake": fake, "bubblewrap": bubblewrap}


@pytest.fixture(
    params=[pytest.param("fake"), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)],
)
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SuiteHost]:
    made = HOSTS[request.param](tmp_path)
    yield made
    await made.clear()
