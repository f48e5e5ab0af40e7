"""What the cluster's tests share: sessions over a replica, where they are, and how long is too long here."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.e2e.operating import admin, python
from tests.support.machines import Machine
from tests.support.replica import Replica

T = TypeVar("T")
AGENT = "toolhost_agent.py fd:"  # in the command line of every sandbox's first process


def key(name: str) -> dict[str, str]:
    """The header of a retained session."""
    return {"x-toolhost-session": session(name)}


def session(name: str) -> str:
    return f"kept-by-the-cluster-{name}"


async def call(replica: Replica, name: str, code: str, attempt: str | None = None) -> str:
    return await python(replica, key(name), code, attempt=attempt)


async def collected(replica: Replica, name: str, attempt: str) -> dict[str, Any]:
    """An attempt's outcome: its text and its receipt; waits while it runs."""
    path = f"/v1/sessions/retained/{session(name)}/attempts/{attempt}"
    status, body = await asyncio.to_thread(lambda: replica.get(path))
    assert status == 200, (status, body[:500])
    found: dict[str, Any] = json.loads(body)
    return found


async def many(work: Iterable[Awaitable[T]], at_once: int = 20) -> list[T]:
    """All of it, so much at once: what is measured is not how many connections a test can open."""
    gate = asyncio.Semaphore(at_once)

    async def one(part: Awaitable[T]) -> T:
        async with gate:
            return await part

    return list(await asyncio.gather(*map(one, work)))


async def places(replica: Replica) -> dict[str, str]:
    """The address of the node of each session that has a sandbox, by the session's digest."""
    listed = (await admin(replica, "?limit=10000"))["sessions"]
    return {one["session"]: one["sandbox"]["node"].partition(":")[0] for one in listed if one["sandbox"]}


async def per_node(replica: Replica) -> Counter[str]:
    return Counter((await places(replica)).values())


def sandboxes(machines: Iterable[Machine]) -> list[int]:
    """How many sandboxes run on each machine, as its processes say."""
    return [
        sum(process.innermost == 1 and AGENT in process.command for process in machine.processes())
        for machine in machines
    ]


def stretch() -> float:
    """How much longer than on a machine with processors to spare things take here now: bounds are times this."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Timed:
    """What a call took, seconds."""

    value: Any
    s: float

    def within(self, bound_s: float) -> None:
        allowed = bound_s * stretch()
        assert self.s <= allowed, (
            f"{self.s:.2f} s, and {bound_s:g} s ({allowed:.1f} s on a machine so busy) is the most"
        )


async def timed(work: Awaitable[Any], began: float | None = None) -> Timed:
    began = time.monotonic() if began is None else began
    return Timed(await work, time.monotonic() - began)


async def again_until(ask: Callable[[], Awaitable[T]], good: Callable[[T], bool], bound_s: float, what: str) -> T:
    """Asks until the answer is a good one."""
    deadline = time.monotonic() + bound_s
    seen: Sequence[Any] = []
    while True:
        try:
            answer = await ask()
            if good(answer):
                return answer
            seen = [answer]
        except (OSError, EOFError, AssertionError) as error:
            seen = [error]
        assert time.monotonic() < deadline, (what, seen)
        await asyncio.sleep(0.05)
