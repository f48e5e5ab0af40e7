"""The long form: 30 kills at random moments on each backend, and soaks of thousands of rounds (make torture)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.e2e.operating import BACKENDS, operated
from tests.e2e.soak import check, soak
from tests.e2e.test_recovery import MOMENTS, SEED, survive

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(30))
async def test_a_kill_at_a_random_moment_loses_nothing_and_runs_nothing_twice(
    tmp_path: Path, backend: str, seed: int
) -> None:
    chance = random.Random(f"{SEED} {backend} {seed}")
    with operated(tmp_path, backend) as host:
        await survive(host, MOMENTS[seed % len(MOMENTS)], chance)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_5000_rounds_leave_nothing_behind(tmp_path: Path, backend: str) -> None:
    number = 5000 if backend == "bubblewrap" else 1000  # a container takes ten times as long
    with operated(tmp_path, backend, "--max-sessions", "12", "--log-level", "warning") as host:
        await asyncio.to_thread(host.start)
        before, after = await soak(host, 200, number - 200)
        check(before, after)
