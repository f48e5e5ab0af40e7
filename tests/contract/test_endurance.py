"""What code does to its own session, on every backend that isolates: see the suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes.testing.endurance_suite import EnduranceSuite
from sandboxes.testing.host import SuiteHost
from tests.contract.hosts import HOSTS
from tests.contract.isolating import ISOLATING


@pytest.fixture(params=ISOLATING)
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SuiteHost]:
    made = HOSTS[request.param](tmp_path)
    yield made
    await made.clear()


class TestEndurance(EnduranceSuite):
    """The suite, on each."""
