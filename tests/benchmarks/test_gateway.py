"""What the gateway costs beside the model, in one run; the figures themselves are `make bench`'s."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import gateway

pytestmark = pytest.mark.timeout(240)


async def test_an_event_costs_a_few_times_what_it_costs_the_fake_model_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "STREAMS", 20)
    async with gateway.targets(tmp_path) as (direct, behind):
        for _ in range(2):
            await direct.steady()
            await behind.steady()  # raises when an event is missing
    assert behind.cpu.values[1] < 8 * direct.cpu.values[1]
