"""Rounds of connect, call, close, and what a host holds before and after them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import psutil

from tests.e2e.operating import admin, connect, running_sandboxes
from tests.support.host import RunningHost
from tests.support.waiting import until

AT_ONCE = 6
# How a round ends: cleaned up, gone without a word, or closed by the operator.
ENDINGS = ("cleanup", "gone", "operator")
GROWN_BYTES = 24 << 20  # allocators keep pages; what leaks by the round is more than that over a run


@dataclass(frozen=True)
class Held:
    """What a host has in its hands. `rows`: of open sessions."""

    memory: int
    descriptors: int
    threads: int
    sandboxes: int
    rows: int


async def held(host: RunningHost) -> Held:
    assert host.process is not None
    process = psutil.Process(host.process.pid)
    rows = len((await admin(host))["sessions"])
    return Held(process.memory_info().rss, process.num_fds(), process.num_threads(), len(running_sandboxes(host)), rows)


async def rounds(host: RunningHost, first: int, number: int) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    await asyncio.gather(*(_round(host, index, gate) for index in range(first, first + number)))


async def _round(host: RunningHost, index: int, gate: asyncio.Semaphore) -> None:
    ending = ENDINGS[index % len(ENDINGS)]
    named = {} if ending == "gone" else {"x-session-id": f"resp_{index:08x}"}
    async with gate, await connect(host, named) as stream:
        assert await stream.python("x = 20; x * 2 + 2") == "42"
        if ending == "cleanup":
            await stream.tool("cleanup_session")
        elif ending == "operator":
            body = json.dumps({"id": f"resp_{index:08x}"}).encode()
            status, answer = await asyncio.to_thread(
                lambda: host.request("POST", "/v1/admin/sessions/close", body=body)
            )
            assert (status, len(json.loads(answer)["closed"])) == (200, 1)


async def soak(host: RunningHost, warm: int, number: int) -> tuple[Held, Held]:
    """What it held when it was warm, and after the rounds, once nothing is on its way out any more."""
    await rounds(host, 0, warm)
    before = await settled(host)
    await rounds(host, warm, number)
    return before, await settled(host)


async def settled(host: RunningHost) -> Held:
    async def nothing() -> bool:
        now = await held(host)
        return now.sandboxes == 0 and now.rows == 0

    await until(nothing, "sessions or sandboxes are left", 60)
    return await held(host)


def check(before: Held, after: Held) -> None:
    assert (after.sandboxes, after.rows) == (before.sandboxes, before.rows) == (0, 0)
    assert after.descriptors <= before.descriptors + 8, (before, after)
    assert after.threads <= before.threads + 4, (before, after)
    assert after.memory <= before.memory + GROWN_BYTES, (before, after)
