"""The acceptance table: which tool results count.

A call is registered before it runs, and every result that arrives is judged in one atomic step. `judge` is pure; the
`Ledger` performs what it decides on a `CallRegistry`, whose `update` is the only way a record changes. Above: the
driver, and a gateway that receives results from applications. Below: the registry (in memory here; a database brings
its own). Times are seconds since 1970, given by the caller.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol

from toolhost.loop.errors import LoopError

CLIENT = "client"
"""The executor of calls that the application answers."""

TerminalKind = Literal["result", "timeout", "cancelled", "lost"]


class Verdict(StrEnum):
    """What becomes of an arrival."""

    ACCEPTED = "accepted"
    UNMATCHED = "unmatched"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    STALE = "stale"
    LATE = "late"
    MISMATCH = "mismatch"


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form: equal values give equal digests, whatever their key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of a call. It is live until `ended` says how it went."""

    id: str
    number: int
    deadline: float
    ended: TerminalKind | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A result as it came in, with everything it claims to belong to."""

    task: str
    generation: int
    call_id: str
    attempt: str
    tool: str
    arguments: str
    executor: str
    content: str
    """Digest of the content; so is `arguments` of the arguments."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An arrival and its verdict, kept for ever."""

    arrival: Arrival
    verdict: Verdict
    at: float


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One registered call.

    `terminal` is the one terminal result, `content` its digest if it was a result. `flagged` is set by a conflict: the
    result is no longer used.
    """

    task: str
    generation: int
    call_id: str
    tool: str
    arguments: str
    executor: str
    principal: str
    attempts: tuple[Attempt, ...]
    terminal: TerminalKind | None = None
    content: str | None = None
    flagged: bool = False
    arrivals: tuple[Judged, ...] = ()
    version: int = 0

    @property
    def attempt(self) -> Attempt:
        """The latest attempt."""
        return self.attempts[-1]

    @property
    def usable(self) -> bool:
        """Whether there is an accepted result that may be used."""
        return self.terminal == "result" and not self.flagged


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """The generation that may deliver; `closed` once the task has ended."""

    task: str
    generation: int = 1
    closed: bool = False
    strays: tuple[Judged, ...] = ()
    """Arrivals that belong to no call of this task."""
    version: int = 0


class CallRegistry(Protocol):
    """Where the table's rows are kept. Both updates are compare-and-set on the whole row.

    `change` is pure and may be called several times; the value it returned last is what was stored.
    """

    async def insert_call(self, record: CallRecord) -> bool:
        """Store a new row; False if (task, call_id) exists, which is then unchanged."""
        ...

    async def call(self, task: str, call_id: str) -> CallRecord | None: ...

    async def call_of_attempt(self, attempt: str) -> CallRecord | None: ...

    async def calls(self, task: str) -> list[CallRecord]:
        """All rows of a task, in order of registration."""
        ...

    async def update_call(
        self, task: str, call_id: str, change: Callable[[CallRecord, TaskRecord], CallRecord]
    ) -> CallRecord | None:
        """Replace the row by what `change` makes of it and of the task's row, atomically; None if there is none."""
        ...

    async def task(self, task: str) -> TaskRecord: ...

    async def update_task(self, task: str, change: Callable[[TaskRecord], TaskRecord]) -> TaskRecord: ...


class MemoryRegistry:
    """The registry of one process. Atomic because nothing awaits between reading a row and storing it."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], CallRecord] = {}
        self._tasks: dict[str, TaskRecord] = {}
        self._attempts: dict[str, tuple[str, str]] = {}

    async def insert_call(self, record: CallRecord) -> bool:
        key = (record.task, record.call_id)
        if key in self._calls:
            return False
        self._store(record)
        return True

    async def call(self, task: str, call_id: str) -> CallRecord | None:
        return self._calls.get((task, call_id))

    async def call_of_attempt(self, attempt: str) -> CallRecord | None:
        key = self._attempts.get(attempt)
        return None if key is None else self._calls[key]

    async def calls(self, task: str) -> list[CallRecord]:
        return [record for key, record in self._calls.items() if key[0] == task]

    async def update_call(
        self, task: str, call_id: str, change: Callable[[CallRecord, TaskRecord], CallRecord]
    ) -> CallRecord | None:
        old = self._calls.get((task, call_id))
        if old is None:
            return None
        new = replace(change(old, self._task(task)), version=old.version + 1)
        self._store(new)
        return new

    async def task(self, task: str) -> TaskRecord:
        return self._task(task)

    async def update_task(self, task: str, change: Callable[[TaskRecord], TaskRecord]) -> TaskRecord:
        old = self._task(task)
        self._tasks[task] = replace(change(old), version=old.version + 1)
        return self._tasks[task]

    def forget(self, task: str) -> None:
        """Drop a task's rows (its audit period is over)."""
        self._tasks.pop(task, None)
        for key in [key for key in self._calls if key[0] == task]:
            for attempt in self._calls.pop(key).attempts:
                self._attempts.pop(attempt.id, None)

    def _task(self, task: str) -> TaskRecord:
        return self._tasks.get(task, TaskRecord(task))

    def _store(self, record: CallRecord) -> None:
        key = (record.task, record.call_id)
        self._calls[key] = record
        for attempt in record.attempts:
            self._attempts[attempt.id] = key


def judge(record: CallRecord, task: TaskRecord, arrival: Arrival, now: float) -> Verdict:
    """The table. The first row that fits decides."""
    attempt = next((one for one in record.attempts if one.id == arrival.attempt), None)
    if attempt is None:
        return Verdict.UNMATCHED
    claimed = (arrival.task, arrival.call_id, arrival.tool, arrival.arguments, arrival.executor, arrival.generation)
    if claimed != (record.task, record.call_id, record.tool, record.arguments, record.executor, record.generation):
        return Verdict.MISMATCH
    if task.closed or record.generation < task.generation:
        return Verdict.STALE
    if record.terminal == "result":
        return Verdict.DUPLICATE if arrival.content == record.content else Verdict.CONFLICT
    if record.terminal is not None or attempt.ended is not None or now >= attempt.deadline:
        return Verdict.LATE
    return Verdict.ACCEPTED


def settle(record: CallRecord, task: TaskRecord, arrival: Arrival, now: float) -> CallRecord:
    """The row after an arrival: its verdict added, and the verdict's effect."""
    verdict = judge(record, task, arrival, now)
    record = replace(record, arrivals=(*record.arrivals, Judged(arrival, verdict, now)))
    if verdict is Verdict.ACCEPTED:
        record = _end_attempt(record, arrival.attempt, "result")
        return replace(record, terminal="result", content=arrival.content)
    if verdict is Verdict.CONFLICT:
        return replace(record, flagged=True)
    live = record.terminal is None and record.attempt.ended is None
    if verdict is Verdict.LATE and live and arrival.attempt == record.attempt.id:
        # The clock ran out before anyone looked: the timeout comes first, as it would have with a faster look.
        return replace(_end_attempt(record, arrival.attempt, "timeout"), terminal="timeout")
    return record


def _end_attempt(record: CallRecord, attempt: str, how: TerminalKind) -> CallRecord:
    ended = tuple(replace(one, ended=how) if one.id == attempt else one for one in record.attempts)
    return replace(record, attempts=ended)


@dataclass
class Ledger:
    """The table's one door."""

    registry: CallRegistry = field(default_factory=MemoryRegistry)

    async def register(self, record: CallRecord) -> None:
        """Enter a call before it runs.

        Raises LoopError if the task already has a call of this id: ids are made unique before they get here.
        """
        if not await self.registry.insert_call(record):
            raise LoopError(f"call {record.call_id!r} is already registered for {record.task}")

    async def deliver(self, arrival: Arrival, now: float) -> Verdict:
        """Judge an arrival and record it; only `accepted` may be used."""
        record = await self.registry.update_call(
            arrival.task, arrival.call_id, lambda row, task: settle(row, task, arrival, now)
        )
        if record is not None and record.arrivals[-1].arrival == arrival:
            return record.arrivals[-1].verdict
        known = record or await self.registry.call_of_attempt(arrival.attempt)
        verdict = Verdict.MISMATCH if known is not None else Verdict.UNMATCHED
        stray = Judged(arrival, verdict, now)
        await self.registry.update_task(arrival.task, lambda task: replace(task, strays=(*task.strays, stray)))
        return verdict

    async def end(self, task: str, call_id: str, attempt: str, how: TerminalKind) -> bool:
        """Give a live attempt its terminal result without a result; False if it already has one.

        `lost` ends the attempt and leaves the call open for a retry; `give_up` closes it.
        """

        def change(row: CallRecord, _: TaskRecord) -> CallRecord:
            live = next((one for one in row.attempts if one.id == attempt and one.ended is None), None)
            if row.terminal is not None or live is None:
                return row
            row = _end_attempt(row, attempt, how)
            return row if how == "lost" else replace(row, terminal=how)

        row = await self.registry.update_call(task, call_id, change)
        return row is not None and any(one.id == attempt and one.ended == how for one in row.attempts)

    async def give_up(self, task: str, call_id: str) -> None:
        """No further attempt: a call whose attempts were all lost is terminally lost."""

        def change(row: CallRecord, _: TaskRecord) -> CallRecord:
            return row if row.terminal is not None else replace(row, terminal="lost")

        await self.registry.update_call(task, call_id, change)

    async def retry(self, task: str, call_id: str, attempt: str, deadline: float) -> bool:
        """Open a further attempt of a call that has no terminal result and no live attempt."""

        def change(row: CallRecord, owner: TaskRecord) -> CallRecord:
            stale = owner.closed or row.generation < owner.generation
            if row.terminal is not None or row.attempt.ended is None or stale:
                return row
            return replace(row, attempts=(*row.attempts, Attempt(attempt, row.attempt.number + 1, deadline)))

        row = await self.registry.update_call(task, call_id, change)
        return row is not None and row.attempt.id == attempt

    async def switch(self, task: str) -> int:
        """Start the next generation and return its number; what belongs to an older one is stale from now on."""
        return (
            await self.registry.update_task(task, lambda row: replace(row, generation=row.generation + 1))
        ).generation

    async def close(self, task: str) -> None:
        """End the task: nothing is accepted for it any more."""
        await self.registry.update_task(task, lambda row: replace(row, closed=True))

    async def current(self, task: str, generation: int) -> bool:
        """Whether this generation may deliver to the user."""
        row = await self.registry.task(task)
        return row.generation == generation and not row.closed

    async def usable(self, task: str, call_id: str) -> bool:
        """Whether the call's accepted result may (still) be used."""
        row = await self.registry.call(task, call_id)
        return row is not None and row.usable

    async def query(self, task: str) -> list[Mapping[str, Any]]:
        """The task's rows as plain data, for a trace."""
        return [row_as_data(row) for row in await self.registry.calls(task)]


def row_as_data(row: CallRecord) -> dict[str, Any]:
    """A row as JSON data."""
    return {
        "call_id": row.call_id,
        "generation": row.generation,
        "tool": row.tool,
        "executor": row.executor,
        "principal": row.principal,
        "arguments_digest": row.arguments,
        "terminal": row.terminal,
        "flagged": row.flagged,
        "attempts": [
            {"id": one.id, "number": one.number, "deadline": one.deadline, "ended": one.ended} for one in row.attempts
        ],
        "arrivals": [
            {"attempt": one.arrival.attempt, "verdict": str(one.verdict), "at": one.at, "content": one.arrival.content}
            for one in row.arrivals
        ],
    }
