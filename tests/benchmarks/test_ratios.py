"""Whether a change made calls slower, by ratios within one run. The bounds are wide enough for a busy machine, and
narrow enough for what would be noticed: a process started for each call, a wait that sleeps, a file read to its end.
It is the fastest of many that is compared: what a change adds is in each, what other work on the machine adds is not.

The figures themselves are `make bench`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from benchmarks.bench import session
from benchmarks.processes import cpu_s, server, tool_host, tree
from benchmarks.raw_client import RawClient
from benchmarks.samples import Operation, Samples, Variant, take_turns
from tests.support.host import RunningHost

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(120)]

CALLS = 200
ROUNDS = 5


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


async def cpu_of(operations: dict[str, tuple[Operation, Callable[[], list[int]]]]) -> dict[str, float]:
    """Seconds of cpu of some processes for one call, the least of several turns."""
    found = dict.fromkeys(operations, float("inf"))
    for _ in range(ROUNDS):
        for name, (operation, pids) in operations.items():
            await operation()
            before = {pid: cpu_s(pid) for pid in pids()}
            for _ in range(CALLS // ROUNDS):
                await operation()
            used = sum(cpu_s(pid) - was for pid, was in before.items())
            found[name] = min(found[name], used / (CALLS // ROUNDS))
    return found


def fastest(rows: dict[str, Samples], name: str) -> float:
    assert not rows[name].error, rows[name].error
    return min(rows[name].values)


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
    assert fastest(rows, "python") < 6 * fastest(rows, "empty")


async def test_a_call_costs_the_host_the_cpu_of_an_empty_tool_and_its_sandbox_not_much_more(
    empty: tuple[RawClient, int], host: RunningHost
) -> None:
    client = await session(host, "cpu")
    assert host.process is not None
    pid = host.process.pid
    cpu = await cpu_of(
        {
            "empty": (lambda: empty[0].call("empty", {}), lambda: [empty[1]]),
            "host": (python(client), lambda: [pid]),
            "all": (python(client), lambda: tree(pid)),
        }
    )
    await client.close()
    assert cpu["host"] < 2.5 * cpu["empty"]
    assert cpu["all"] < 15 * cpu["empty"]  # a process started for each call costs more


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
    assert fastest(rows, "many") < 2 * fastest(rows, "few")


async def test_printing_ten_times_as_much_takes_about_ten_times_as_long_at_most(host: RunningHost) -> None:
    client = await session(host, "printer")
    code = "import sys\n_ = sys.stdout.write(('x' * 99 + '\\n') * {lines})"
    variants = {
        "1 MB": Variant(python(client, code.format(lines=10_000))),
        "10 MB": Variant(python(client, code.format(lines=100_000))),
    }
    rows = await take_turns(variants, rounds=5)
    await client.close()
    assert fastest(rows, "10 MB") < 25 * fastest(rows, "1 MB")
