"""The docker backend keeps the contract: over the socket, over the attach stream, and with gVisor's kernel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes.stores.sqlite import SqliteStore
from sandboxes.testing.backend_suite import BackendSuite
from sandboxes.testing.host import SuiteHost
from tests.sandboxes.backends.docker_host import SMALL, DockerHost

WAYS = {"socket": {}, "attach": {"channel": "attach"}, "runsc": {"runtime": "runsc"}}


@pytest.fixture(
    params=[
        pytest.param("socket", marks=pytest.mark.docker),
        pytest.param("attach", marks=pytest.mark.docker),
        pytest.param("runsc", marks=pytest.mark.runsc),
    ]
)
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SuiteHost]:
    place = DockerHost(tmp_path, WAYS[request.param])
    made = SuiteHost(
        backend=lambda owner: place.backend(owner),
        store=lambda: SqliteStore(tmp_path / "ledger.db"),
        owner=place.owner,
        stranger=place.stranger,
        leftovers=place.leftovers,
        state=tmp_path,
        grace_s=0.3,
        spec=SMALL,
    )
    yield made
    await made.clear()


class TestDocker(BackendSuite):
    """The suite, on each way to run a container and to reach its agent."""
