from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import RunningHost


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHost]:
    state_dir: Path = tmp_path_factory.mktemp("host") / "state"
    running = RunningHost(state_dir, backend=request.param).start()
    yield running
    running.purge()


@pytest.fixture(scope="session")
def tool_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHost]:
    """For what does not depend on the backend."""
    running = RunningHost(tmp_path_factory.mktemp("tool-host") / "state").start()
    yield running
    running.purge()
