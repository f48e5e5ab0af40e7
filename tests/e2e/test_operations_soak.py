"""Round after round a host comes back to where it was."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.operating import operated
from tests.e2e.soak import check, soak

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(300)]


async def test_500_rounds_of_connect_call_close_leave_nothing_behind(tmp_path: Path) -> None:
    with operated(tmp_path, "bubblewrap", "--max-sessions", "12", "--log-level", "warning") as host:
        await asyncio.to_thread(host.start)
        before, after = await soak(host, 60, 440)
        check(before, after)
        assert await asyncio.to_thread(host.terminate) == 0
