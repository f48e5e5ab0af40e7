"""Who may have a sandbox now, who waits, and who is told to come back.

Above: `manager`. Below: `clock`, `errors`.

Caps hold in total and for each principal. Whoever does not get a place at once waits in a bounded queue, for a bounded
time. A free place goes to the waiting principal that holds the fewest; of equals, to the one that was served longest
ago; within a principal in the order of arrival. So one that floods the queue cannot starve another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sandboxes.clock import Clock
from sandboxes.errors import NoCapacity

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
FIRST_GUESS_S = 5.0  # between releases, until there were some
SMOOTHING = 0.3


@dataclass(eq=False, slots=True)
class Slot:
    """A place for one sandbox. Given back exactly once, by `release`."""

    principal: str
    held: bool = True


class Admission:
    """`on_pressure(principal)` is called when one has to wait: the manager may close something idle for it."""

    def __init__(
        self,
        *,
        total: int,
        per_principal: int,
        max_waiting: int,
        queue_s: float,
        clock: Clock,
        on_pressure: Callable[[str], None] = lambda principal: None,
    ) -> None:
        self.total = total
        self.held = 0
        self._per_principal = per_principal
        self._max_waiting = max_waiting
        self._queue_s = queue_s
        self._clock = clock
        self._on_pressure = on_pressure
        self.on_release: Callable[[], None] = lambda: None
        self._held: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[Slot]]] = {}
        self._served: dict[str, int] = {}
        self._turns = 0
        self._interval_s = FIRST_GUESS_S
        self._released_at: float | None = None

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def free(self) -> int:
        return self.total - self.held

    def held_by(self, principal: str) -> int:
        return self._held.get(principal, 0)

    def capped(self, principal: str) -> bool:
        """Whether it is the principal's own cap that keeps it from another place."""
        return self.held_by(principal) >= self._per_principal

    async def acquire(self, principal: str, on_wait: Callable[[int], None] = lambda position: None) -> Slot:
        """A place, at once or after waiting; `on_wait` hears how many wait, this one included.

        Raises NoCapacity when the queue is full or the time is over. Safe to cancel.
        """
        if not self.waiting and self._room(principal):
            return self._grant(principal)
        if self.waiting >= self._max_waiting and not self._make_way(principal):
            raise self._refusal(principal)
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(principal, deque()).append(future)
        self._serve()  # others may wait for their own caps only
        if future.done():
            return future.result()
        on_wait(self.waiting)
        self._on_pressure(principal)
        timer = asyncio.create_task(self._expire(future, principal), name="admission-deadline")
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())  # it was granted in the same moment
            raise
        finally:
            timer.cancel()
            self._forget(principal, future)

    def adopt(self, principal: str) -> Slot:
        """A place for a sandbox that exists already, also beyond the caps: they then hold for the next ones."""
        return self._grant(principal)

    def release(self, slot: Slot) -> None:
        """Gives a place back. Idempotent."""
        if not slot.held:
            return
        slot.held = False
        self.held -= 1
        self._held[slot.principal] -= 1
        if not self._held[slot.principal]:
            del self._held[slot.principal]
        self._note_release()
        self._serve()
        self.on_release()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _room(self, principal: str) -> bool:
        return self.held < self.total and not self.capped(principal)

    def _grant(self, principal: str) -> Slot:
        self.held += 1
        self._held[principal] = self.held_by(principal) + 1
        self._turns += 1
        self._served[principal] = self._turns
        if len(self._served) > 10_000:  # principals come and go; only the order of recent ones matters
            self._served = dict(sorted(self._served.items(), key=lambda item: item[1])[5_000:])
        return Slot(principal)

    def _serve(self) -> None:
        while candidates := [principal for principal in self._waiting if self._room(principal)]:
            principal = min(candidates, key=lambda name: (self.held_by(name), self._served.get(name, 0)))
            queue = self._waiting[principal]
            future = queue.popleft()
            if not queue:
                del self._waiting[principal]
            if not future.done():
                future.set_result(self._grant(principal))

    def _forget(self, principal: str, future: asyncio.Future[Slot]) -> None:
        queue = self._waiting.get(principal)
        if queue is not None and future in queue:
            queue.remove(future)
            if not queue:
                del self._waiting[principal]

    def _make_way(self, principal: str) -> bool:
        """In a full queue the longest line gives up its last place to a shorter one."""
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=principal)
        if len(self._waiting.get(principal, ())) + 1 >= len(self._waiting.get(longest, ())):
            return False
        last = self._waiting[longest].pop()
        if not last.done():
            last.set_exception(self._refusal(longest))
        return True

    async def _expire(self, future: asyncio.Future[Slot], principal: str) -> None:
        await self._clock.sleep(self._queue_s)
        if not future.done():
            future.set_exception(self._refusal(principal))

    def _note_release(self) -> None:
        now = self._clock.now()
        if self._released_at is not None:
            interval = min(max(now - self._released_at, 0.0), MAX_RETRY_S)
            self._interval_s += SMOOTHING * (interval - self._interval_s)
        self._released_at = now

    def _refusal(self, principal: str) -> NoCapacity:
        retry_s = min(max(self._interval_s * (self.waiting + 1), MIN_RETRY_S), MAX_RETRY_S)
        if self.capped(principal):
            what = f"at capacity: {self.held_by(principal)} sandboxes of yours are open, which is the limit"
        else:
            what = f"at capacity: all {self.total} sandboxes are in use"
        return NoCapacity(what, retry_after_s=retry_s)
