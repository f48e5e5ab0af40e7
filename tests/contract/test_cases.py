"""What broke other tools between host, transport and engine, on every backend that isolates: see the suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes.testing.case_suite import CaseSuite
from sandboxes.testing.host import SuiteHost
from tests.contract.hosts import HOSTS
from tests.contract.isolating import ISOLATING


@pytest.fixture(params=ISOLATING)
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SuiteHost]:
    made = HOSTS[request.param](tmp_path)
    yield made
    await made.clear()


class TestCases(CaseSuite):
    """The suite, on each."""
