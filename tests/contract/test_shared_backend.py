"""Two hosts over one store and real sandboxes of one machine: each reaches what the other started."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes.backends.base import Backend
from sandboxes.manager import SessionManager
from sandboxes.owner import Owner
from sandboxes.spec import Ending
from sandboxes.stores.memory import MemoryStore
from sandboxes.testing.backend_suite import run, started
from sandboxes.testing.host import SuiteHost, attach, crash, text_of, until
from tests.contract.hosts import HOSTS

pytestmark = pytest.mark.bubblewrap


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[SuiteHost]:
    made = HOSTS["bubblewrap"](tmp_path)
    store = MemoryStore()
    alone = made.backend

    def shared(owner: Owner) -> Backend:
        backend = alone(owner)
        backend.shared = True  # two objects on one state directory stand for two hosts that share a cluster
        return backend

    made = dataclasses.replace(made, backend=shared, store=lambda: store)
    yield made
    await made.clear()


async def open_host(host: SuiteHost) -> SessionManager:
    manager = host.make(beat_s=0.1)
    await manager.open()
    return manager


async def test_two_hosts_share_real_sandboxes_and_one_outlives_the_other(host: SuiteHost) -> None:
    a, b = await open_host(host), await open_host(host)
    outcomes = await asyncio.gather(
        *(run(attach(m, f"k{n}"), "c = globals().get('c', 0) + 1\nc") for n in range(4) for m in (a, b))
    )
    for one, two in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert sorted([text_of(one), text_of(two)]) == ["1", "2"]
        assert sorted([one.receipt.sequence, two.receipt.sequence]) == [1, 2]
    assert len(await a._backend.list_owned()) == 4

    await run(attach(a, "k0"), "x = 42")
    running = await started(attach(a, "k1"), "import time; time.sleep(1.5); 6 * 7", attempt="long")
    await crash(a)
    await asyncio.gather(running, return_exceptions=True)
    began = time.monotonic()
    assert text_of(await run(attach(b, "k0"), "x")) == "42"
    assert time.monotonic() - began < 10
    collected = await b.collect(attach(b, "k1").key, "long")
    assert (collected.receipt.ending, text_of(collected)) == (Ending.OK, "42")
    assert text_of(await run(attach(b, "k1"), "c")) in ("1", "2")

    await attach(b, "k2").gone()
    assert await b.close_session(attach(b, "k2").key)
    assert len(await b._backend.list_owned()) == 3
    await b.close()


async def test_a_clean_up_at_one_host_ends_the_real_sandbox_that_another_knows(host: SuiteHost) -> None:
    a, b = await open_host(host), await open_host(host)
    at, bt = attach(a, "k"), attach(b, "k")
    await run(at, "x = 1")
    await run(bt, "x")
    await at.cleanup()
    await asyncio.sleep(0.2)
    assert text_of(await run(bt, "x")) == "1"
    await bt.cleanup()
    await until(lambda: not host.leftovers())
    outcome = await run(at, "'x' in globals()")
    assert text_of(outcome) == "False"
    assert "its client cleaned it up" in (outcome.state_lost_before or "")
    await a.close()
    await b.close()
