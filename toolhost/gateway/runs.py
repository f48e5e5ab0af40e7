"""The responses that this process runs, and its share of the others: leases, cancels, and what a dead gateway left.

Above: `service`. Below: `run`, the store. A running response has a lease that its runner renews. A lease that is due
belongs to nobody: whoever takes it over by compare-and-set ends that response truly, or begins it if it never began.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from toolhost.gateway.counts import Counts
from toolhost.gateway.records import OPEN, ResponseRecord, lease_key, response_key, turn_key
from toolhost.gateway.replay import Replay
from toolhost.gateway.run import STOPPED, Keep, Run, failing, queued, sealing
from toolhost.gateway.stores.base import Append, Change, Conflict, Put, Remove, StoreError

log = logging.getLogger("toolhost.gateway")

Resume = Callable[[ResponseRecord], Awaitable[Run]]
"""Makes the run of a queued response that another gateway took in. Raises ApiError."""
Begin = Callable[[Run], Awaitable[None]]
"""Starts a run's loop. Raises RequestError, ApiError."""

SHUTDOWN_S = 10.0
PAGE = 100
SEAL_S = 3.0
"""How long a cancel waits for the runner to close what is open."""


def cancel_key(ident: str) -> str:
    return f"cancel/{ident}"


@dataclass
class Runs:
    """See the module. `worker` names this process; `begin` and `resume` come from the service above."""

    keep: Keep
    worker: str
    max_background: int
    begin: Begin
    resume: Resume
    counts: Counts
    _running: dict[str, Run] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _performing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.max_background)
        self._closing = False
        self.counts.watch(lambda: len(self._running))

    async def open(self) -> None:
        if not self.keep.store.shared:
            await self.keep.store.clear_due()  # this file's former gateway is gone: it held the lock
            await self.reconcile()
        self._spawn(self._beat())

    async def close(self) -> None:
        """End: queued responses are left to whoever comes next, running ones end within a bound."""
        self._closing = True
        running = [run for run in self._running.values() if run.begun]
        if running:
            await asyncio.wait([run.done for run in running], timeout=SHUTDOWN_S)
        for run in [run for run in self._running.values() if run.begun]:
            await run.fail("the gateway was stopped before the end of this response")
            run.cancel()
        if self._performing:
            await asyncio.wait(self._performing, timeout=SHUTDOWN_S)  # their tools are cleaned up, too
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def get(self, ident: str) -> Run | None:
        return self._running.get(ident)

    def lease(self, ident: str, expected: int = 0) -> Put:
        return Put(lease_key(ident), {"worker": self.worker}, expected, due_s=self.keep.lease_s)

    # --- running -----------------------------------------------------------------------------------------------------

    async def start(self, run: Run) -> None:
        """Run a response whose rows are written. Returns once its loop has begun, or it is queued.

        Raises RequestError, ApiError from `begin`: nothing was started and the rows are the caller's to remove.
        """
        if not run.record.background:
            await self._begin(run)
            self._keep_going(self._perform(run))
        elif self._places.locked():
            self._running[run.id] = run
            self._spawn(self._wait_and_perform(run))
        else:
            await self._places.acquire()
            try:
                await self._begin(run)
            except BaseException:
                self._places.release()
                raise
            self._keep_going(self._perform(run, self._places.release))

    async def _begin(self, run: Run) -> None:
        self._running[run.id] = run
        try:
            await self.begin(run)
        except BaseException:
            self._running.pop(run.id, None)
            raise

    async def _wait_and_perform(self, run: Run) -> None:
        async with self._places:
            try:
                if run.done.done() or self._closing:
                    return  # cancelled while it waited; or left to whoever comes next
                await self.begin(run)
            except Exception as error:  # noqa: BLE001 - it is the response that fails, visibly
                await run.fail(str(error), "invalid_prompt")
                return
            finally:
                if not run.begun:
                    self._running.pop(run.id, None)
            await self._keep_going(self._perform(run))

    async def _perform(self, run: Run, then: Callable[[], None] = lambda: None) -> None:
        watching = self._spawn(self._watch(run))
        started = time.monotonic()
        try:
            await run.finish()
        finally:
            if run.done.done() and not run.done.cancelled():
                self.counts.ended(run.done.result()["status"], time.monotonic() - started)
            watching.cancel()
            self._running.pop(run.id, None)
            then()

    async def _watch(self, run: Run) -> None:
        """Hear of a cancel by another gateway at once (at the next beat at the latest)."""
        with self.keep.store.watch(cancel_key(run.id)) as asked:
            while True:
                await asked.wait()
                asked.clear()
                with contextlib.suppress(StoreError):
                    await run.look()

    # --- cancel ------------------------------------------------------------------------------------------------------

    async def cancel(self, record: ResponseRecord) -> ResponseRecord:
        """Cancel a response wherever it runs; one that has ended stays as it is. The record afterwards."""
        while record.status in OPEN:
            waiting = record.status == "queued"
            replay = await self.replay(record.id)
            response = {**current(record, replay), "status": "cancelled"}
            new = replace(record, status="cancelled", response=response, sealed=waiting, request=None)
            changes: list[Change] = [new.put(self.keep.ttl_s)]
            line = queued(record)
            if waiting:
                changes += [Remove(lease_key(record.id)), *await self._released(record, False)]
                changes.append(Append(response_key(record.id), 0, [line]))
            else:
                known = await self.keep.store.get(cancel_key(record.id))
                version = 0 if known is None else known.version
                changes.append(Put(cancel_key(record.id), {}, version, ttl_s=self.keep.lease_s * 4))
            try:
                await self.keep.store.write(*changes)
            except Conflict:
                row = await self.keep.store.get(response_key(record.id))
                if row is None:
                    return record
                record = ResponseRecord.of(row)
                continue
            record = new.written()
            run = self._running.get(record.id)
            if run is not None:
                run.cancel()
                if waiting:
                    run.feed.add(line)
                    run.feed.end()
                    if not run.done.done():
                        run.done.set_result(response)
        return await self._sealed(record)

    async def _sealed(self, record: ResponseRecord) -> ResponseRecord:
        """The record once its runner has closed it, or as it is after a bounded wait."""
        key = response_key(record.id)
        with self.keep.store.watch(key) as changed, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEAL_S):
                while not record.sealed:
                    changed.clear()
                    row = await self.keep.store.get(key)
                    if row is None:
                        break
                    record = ResponseRecord.of(row)
                    if not record.sealed:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(0.5):
                                await changed.wait()
        return record

    async def replay(self, ident: str) -> Replay:
        """What a stored response's log says so far."""
        replay = Replay()
        while lines := await self.keep.store.entries(response_key(ident), replay.count):
            for line in lines:
                replay.add(json.loads(line.partition(" ")[2]))
        return replay

    # --- leases ------------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.keep.lease_s / 3)
            try:
                for run in list(self._running.values()):
                    await self._renew(run)
                await self.reconcile()
            except StoreError as error:
                log.error("leases cannot be renewed: %s", error)
            except Exception:
                log.exception("the reconciler failed; it goes on")

    async def _renew(self, run: Run) -> None:
        if run.lease_version == 0 or run.done.done():
            return
        try:
            await self.keep.store.write(self.lease(run.id, run.lease_version))
            run.lease_version += 1
        except Conflict:
            pass  # it has just ended, or another gateway has taken it: the row says which
        await run.look()

    async def reconcile(self) -> None:
        """Take over what nobody renews. What is taken is not due any more, so pages come to an end."""
        while True:
            found = await self.keep.store.due(PAGE)
            taken = [key for key in found if await self._take(key)]
            if not taken or len(found) < PAGE:
                return

    async def _take(self, key: str) -> bool:
        """Take over one lease, if it is one and nobody else does; whether it was taken."""
        ident = key.partition("/")[2]
        row = await self.keep.store.get(key)
        if row is None or not key.startswith("lease/") or ident in self._running:
            return False
        try:
            await self.keep.store.write(self.lease(ident, row.version))
        except Conflict:
            return False
        await self._take_over(ident, row.version + 1)
        return True

    async def _take_over(self, ident: str, lease_version: int) -> None:
        row = await self.keep.store.get(response_key(ident))
        record = None if row is None else ResponseRecord.of(row)
        if record is None or record.sealed:
            await self.keep.store.write(Remove(lease_key(ident)))
        elif record.status == "queued":
            await self._resume(record, lease_version)
        else:
            await self._close(record)

    async def _resume(self, record: ResponseRecord, lease_version: int) -> None:
        """Begin what was taken in and never begun: nothing of it was executed."""
        log.info("resuming a queued response", extra={"fields": {"response": record.id}})
        try:
            run = await self.resume(record)
        except Exception as error:  # noqa: BLE001 - it is the response that fails, visibly
            await self._close(record, str(error))
            return
        self.counts.adopted("resumed")
        run.lease_version = lease_version
        self._running[run.id] = run
        self._spawn(self._wait_and_perform(run))

    async def _close(self, record: ResponseRecord, reason: str = STOPPED) -> None:
        """End what a dead gateway left, in the log and in the row."""
        log.warning("closing a response that its gateway left", extra={"fields": {"response": record.id}})
        replay = await self.replay(record.id)
        length = replay.count
        if record.status == "cancelled":
            lines, output = sealing(replay)
            ended = replace(record, response={**record.response, "output": output}, sealed=True)
        else:
            lines, response = failing(replay, record, reason)
            ended = replace(record, status="failed", response=response, sealed=True, request=None)
        turn = await self.keep.store.get(turn_key(record.id))
        changes: list[Change] = [ended.put(self.keep.ttl_s), Remove(lease_key(record.id))]
        if lines:
            changes.append(Append(response_key(record.id), length, lines))
        changes += await self._released(record, turn is not None)
        with contextlib.suppress(Conflict):  # somebody was faster: a cancel, or its runner after all
            await self.keep.store.write(*changes)
            self.counts.adopted("closed")

    async def _released(self, record: ResponseRecord, used: bool) -> list[Change]:
        conversations = self.keep.conversations
        unit = await conversations.find(record.unit) if record.unit else None
        if unit is None or unit.busy != record.id:
            return []
        return [conversations.released(unit, record.id, used).put(conversations.ttl_of(unit))]

    def _keep_going(self, work: Any) -> asyncio.Task[None]:
        task = self._spawn(work)
        self._performing.add(task)
        task.add_done_callback(self._performing.discard)
        return task

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def current(record: ResponseRecord, replay: Replay) -> dict[str, Any]:
    """A running response's object as it stands."""
    if not replay.began:
        return record.response
    return {**(replay.response or record.response), "output": replay.items}
