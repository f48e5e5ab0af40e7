"""An orderly stop: what it leaves, what it says of that, and that nothing left runs for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.operating import BACKENDS, operated, python, running_sandboxes
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)

KEPT = {"x-session-id": "chosen"}


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_kept_sandbox_whose_host_never_comes_back_ends_itself(tmp_path: Path, backend: str) -> None:
    with operated(tmp_path, backend) as host:
        host.environment["TOOLHOST_LIFECYCLE__FENCE_S"] = "5"
        await asyncio.to_thread(host.start)
        await python(host, KEPT, "x = 1")
        assert await asyncio.to_thread(host.terminate) == 0
        said = host.log_text().splitlines()[-1]
        assert "1 sandbox with" in said
        assert "sessions prune --all" in said
        assert "ON_STOP=close" in said

        async def gone() -> bool:
            return not await asyncio.to_thread(running_sandboxes, host)

        await until(gone, "the sandbox outlived its fence")
        await asyncio.to_thread(host.start)
        text = await python(host, KEPT, "x")
        assert "lost" in text
        assert "NameError" in text


async def test_a_stop_that_closes_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    with operated(tmp_path, "bubblewrap") as host:
        host.environment["TOOLHOST_LIFECYCLE__ON_STOP"] = "close"
        await asyncio.to_thread(host.start)
        await python(host, KEPT, "x = 1")
        assert await asyncio.to_thread(host.terminate) == 0
        assert "no sandbox is left" in host.log_text().splitlines()[-1]
        assert running_sandboxes(host) == []
