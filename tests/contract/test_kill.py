"""`kill -9` of a host at a random moment, then another start: nothing is lost, nothing runs twice, nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes.errors import AttemptUnknown, SessionUnknown
from sandboxes.spec import Ending, Execution, PythonCall, Retention
from sandboxes.testing.backend_suite import run
from sandboxes.testing.host import SuiteHost, attach, text_of
from tests.contract.hosts import HOSTS
from tests.contract.kill_host import COUNT

SESSIONS = 5
BACKENDS = [pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]


@pytest.fixture
async def killed(tmp_path: Path, backend: str) -> AsyncIterator[SuiteHost]:
    host = HOSTS[backend](tmp_path)
    yield host
    await host.clear()


async def run_and_kill(backend: str, directory: Path, seed: int) -> dict[str, dict[int, str]]:
    """Runs a host and kills it. Returns, by session and number, the values that it had acknowledged."""
    host = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.contract.kill_host",
        backend,
        str(directory),
        str(SESSIONS),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert host.stdout is not None
    try:
        assert await host.stdout.readline() == b"opening\n"
        await asyncio.sleep(random.Random(seed).uniform(0.0, 1.5))
    finally:
        host.kill()
        said = (await host.stdout.read()).decode()
        await host.wait()
    values: dict[str, dict[int, str]] = {}
    *lines, _cut = said.split("\n")  # it dies in the middle of a line, too
    for line in lines:
        if line.startswith("session-") and line.count(" ") == 2:
            session, number, value = line.split(" ")
            values.setdefault(session, {})[int(number)] = value
    return values


async def check(host: SuiteHost, values: dict[str, dict[int, str]]) -> None:
    async with host.manager() as manager:
        for name in (f"session-{number}" for number in range(SESSIONS)):
            at = attach(manager, name, Retention.RETAINED)
            told = values.get(name, {})
            for number, value in told.items():
                assert (await manager.collect(at.key, f"{name}-{number}")).value == value
            ident = f"{name}-{len(told)}"  # the one that was under way
            try:
                under_way = await manager.collect(at.key, ident)
            except (AttemptUnknown, SessionUnknown):
                under_way = None
            again = await at.run(Execution(PythonCall(COUNT.format(ident=ident)), attempt_id=ident))
            if under_way is not None and under_way.receipt.ending is not Ending.NEVER_STARTED:
                assert again.receipt == under_way.receipt
            lines = text_of(await run(at, "print(open('/mnt/data/ran').read(), end='')")).split()
            assert max(Counter(lines).values()) == 1
            ran = len(told) + 1
            assert lines == [f"{name}-{number}" for number in range(ran)]
            assert text_of(await run(at, "n")) == str(ran)
        await asyncio.gather(*(manager.close_session(info.record.key) for info in await manager.sessions()))
    assert host.leftovers() == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
async def test_a_host_killed_at_a_random_moment_loses_nothing(
    killed: SuiteHost, tmp_path: Path, backend: str, seed: int
) -> None:
    await check(killed, await run_and_kill(backend, tmp_path, seed))


@pytest.mark.torture
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(100, 130))
async def test_a_host_killed_at_many_random_moments_loses_nothing(
    killed: SuiteHost, tmp_path: Path, backend: str, seed: int
) -> None:
    await check(killed, await run_and_kill(backend, tmp_path, seed))
