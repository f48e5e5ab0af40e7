"""A clock that stands still until it is turned."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """`advance` wakes whoever sleeps no longer than that, in order."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ids = itertools.count()

    def now(self) -> float:
        return self._now

    @property
    def sleeping(self) -> int:
        """How many wait."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._ids), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Turns the clock, and lets everything that this wakes run until it waits again."""
        until = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            at, _, future = heapq.heappop(self._sleepers)
            self._now = max(self._now, at)
            if not future.done():
                future.set_result(None)
                await settle()
        self._now = until
        await settle()


async def settle(rounds: int = 50) -> None:
    """Lets tasks that are ready run on. For what goes through threads or sockets, wait on an event instead."""
    for _ in range(rounds):
        await asyncio.sleep(0)
