"""Whether a change made calls slower, by ratios within one run. The bounds are wide enough for a busy machine, and
narrow enough for what would be noticed: a process started for each call, a wait that sleeps, a file read to its end.

The figures themselves are `make bench`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.bench import session
from benchmarks.processes import cpu_s, server, tool_host
from benchmarks.raw_client import RawClient
from benchmarks.samples import Operation, Samples, Variant, take_turns
from tests.support.host import RunningHost

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(120)]

CALLS = 200


@pytest.fixture
async def empty() -> AsyncIterator[tuple[RawClient, int]]:
    """A client of an empty tool on the same SDK, and its server's pid."""
    async with server("empty-mcp") as (port, pid):
        client = RawClient("127.0.0.1", port, "/sse")
        await client.connect()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            yield client, pid


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[RunningHost]:
    async with tool_host(tmp_path, "bubblewrap", LIFECYCLE__MAX_SESSIONS="64") as running:
        yield running


def python(client: RawClient, code: str = "1+1") -> Operation:
    return lambda: client.call("python", {"code": code})


async def cpu_of(operation: Operation, pid: int) -> float:
    """Seconds of cpu of a server process for one call."""
    for _ in range(20):
        await operation()
    before = cpu_s(pid)
    for _ in range(CALLS):
        await operation()
    return (cpu_s(pid) - before) / CALLS


def median(rows: dict[str, Samples], name: str) -> float:
    assert not rows[name].error, rows[name].error
    return rows[name].median


async def test_a_call_takes_a_few_times_what_an_empty_tool_takes(
    empty: tuple[RawClient, int], host: RunningHost
) -> None:
    client = await session(host, "warm")
    variants = {
        "empty": Variant(lambda: empty[0].call("empty", {}), 25),
        "python": Variant(python(client), 25),
    }
    rows = await take_turns(variants, rounds=6)
    await client.close()
    assert median(rows, "python") < 6 * median(rows, "empty")


async def test_a_call_costs_the_host_about_the_cpu_of_an_empty_tool(
    empty: tuple[RawClient, int], host: RunningHost
) -> None:
    client = await session(host, "cpu")
    assert host.process is not None
    ours = await cpu_of(python(client), host.process.pid)
    floor = await cpu_of(lambda: empty[0].call("empty", {}), empty[1])
    await client.close()
    assert ours < 3 * floor


async def test_a_call_costs_the_same_after_many_calls_and_beside_many_sessions(host: RunningHost) -> None:
    old, new = await session(host, "old"), await session(host, "new")
    for _ in range(CALLS):
        await old.call("python", {"code": "x = 1"})
    others = [await session(host, f"other-{number}") for number in range(10)]
    for other in others:
        await other.call("python", {"code": "1"})
    variants = {"few": Variant(python(new), 20), "many": Variant(python(old), 20)}
    rows = await take_turns(variants, rounds=6)
    for client in (old, new, *others):
        await client.close()
    assert median(rows, "many") < 2 * median(rows, "few")


async def test_printing_ten_times_as_much_takes_about_ten_times_as_long_at_most(host: RunningHost) -> None:
    client = await session(host, "printer")
    code = "import sys\n_ = sys.stdout.write(('x' * 99 + '\\n') * {lines})"
    variants = {
        "1 MB": Variant(python(client, code.format(lines=10_000))),
        "10 MB": Variant(python(client, code.format(lines=100_000))),
    }
    rows = await take_turns(variants, rounds=5)
    await client.close()
    assert median(rows, "10 MB") < 25 * median(rows, "1 MB")
