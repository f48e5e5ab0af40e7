"""The backends that the contract suites run on."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    *(f"sandboxes.testing.{name}_suite" for name in ("attack", "backend", "case", "execution", "store"))
)

from sandboxes.testing.host import SuiteHost  # noqa: E402
from tests.contract.hosts import HOSTS  # noqa: E402


@pytest.fixture(
    params=[
        pytest.param("fake"),
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("docker-attach", marks=pytest.mark.docker),
        pytest.param("docker-runsc", marks=pytest.mark.runsc),
        *(["ray"] if "TOOLHOST_TEST_RAY_DIRECTORY" in os.environ else []),  # see tests/cluster/test_ray_backend.py
    ],
)
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SuiteHost]:
    made = HOSTS[request.param](tmp_path)
    yield made
    await made.clear()
