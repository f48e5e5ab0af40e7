"""The acceptance table and open approvals in the gateway's store.

Above: `runs`, which gives them to the loop's driver. Below: `stores.base`. See `toolhost.loop.ledger` for the rules: a
task's row and its calls are one row here, so that both change together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from toolhost.gateway.records import approval_key
from toolhost.gateway.stores.base import Conflict, Put, Remove, Store
from toolhost.loop.approvals import PendingApproval
from toolhost.loop.errors import ApprovalError
from toolhost.loop.ledger import Arrival, Attempt, CallRecord, Judged, TaskRecord, Verdict

T = TypeVar("T")


class StoredRegistry:
    """`toolhost.loop.ledger.CallRegistry` over a store. `ttl_s`: how long rows are kept after their last change.

    What this process wrote of a task it also remembers, for `task` is asked before every fragment of text. Another
    replica never writes a running task's row: it ends the response, which its runner is told.
    """

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._tasks: dict[str, TaskRecord] = {}

    async def insert_call(self, record: CallRecord) -> bool:
        def change(task: TaskRecord, calls: dict[str, CallRecord]) -> tuple[TaskRecord, CallRecord | None]:
            return task, None if record.call_id in calls else record

        return await self._update(record.task, change) is not None

    async def call(self, task: str, call_id: str) -> CallRecord | None:
        return (await self._read(task))[1].get(call_id)

    async def call_of_attempt(self, attempt: str) -> CallRecord | None:
        row = await self._store.get(f"attempt/{attempt}")
        return None if row is None else await self.call(row.data["task"], row.data["call_id"])

    async def calls(self, task: str) -> list[CallRecord]:
        return list((await self._read(task))[1].values())

    async def update_call(
        self, task: str, call_id: str, change: Callable[[CallRecord, TaskRecord], CallRecord]
    ) -> CallRecord | None:
        def work(owner: TaskRecord, calls: dict[str, CallRecord]) -> tuple[TaskRecord, CallRecord | None]:
            old = calls.get(call_id)
            return owner, None if old is None else replace(change(old, owner), version=old.version + 1)

        return await self._update(task, work)

    async def task(self, task: str) -> TaskRecord:
        known = self._tasks.get(task)
        return known if known is not None else (await self._read(task))[0]

    async def update_task(self, task: str, change: Callable[[TaskRecord], TaskRecord]) -> TaskRecord:
        while True:
            owner, calls, version = await self._read(task)
            new = replace(change(owner), version=owner.version + 1)
            try:
                await self._store.write(Put(f"task/{task}", _data(new, calls), version, ttl_s=self._ttl_s))
            except Conflict:
                continue
            self._tasks[task] = new
            return new

    def begin(self, task: str) -> None:
        """A task of this process begins: nobody has written its row yet."""
        self._tasks[task] = TaskRecord(task)

    def forget(self, task: str) -> None:
        """The task has ended: the store alone remembers it."""
        self._tasks.pop(task, None)

    async def _read(self, task: str) -> tuple[TaskRecord, dict[str, CallRecord], int]:
        row = await self._store.get(f"task/{task}")
        if row is None:
            return TaskRecord(task), {}, 0
        owner, calls = _records(row.data)
        return owner, calls, row.version

    async def _update(
        self,
        task: str,
        change: Callable[[TaskRecord, dict[str, CallRecord]], tuple[TaskRecord, CallRecord | None]],
    ) -> CallRecord | None:
        """Store the call that `change` makes; None if it makes none."""
        while True:
            owner, calls, version = await self._read(task)
            owner, call = change(owner, calls)
            if call is None:
                return None
            known = {one.id for one in calls[call.call_id].attempts} if call.call_id in calls else set()
            calls[call.call_id] = call
            pointers = [
                Put(f"attempt/{one.id}", {"task": task, "call_id": call.call_id}, 0, ttl_s=self._ttl_s)
                for one in call.attempts
                if one.id not in known
            ]
            try:
                await self._store.write(Put(f"task/{task}", _data(owner, calls), version, ttl_s=self._ttl_s), *pointers)
            except Conflict as conflict:
                if conflict.key != f"task/{task}":
                    raise
                continue
            return call


class StoredApprovals:
    """`toolhost.loop.approvals.ApprovalStore` over a store: an approval waits through restarts, and is taken once."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s

    async def put(self, pending: PendingApproval) -> None:
        await self._store.write(Put(approval_key(pending.id), asdict(pending), 0, ttl_s=self._ttl_s))

    async def take(self, approval_id: str, principal: str) -> PendingApproval:
        pending, version = await self._find(approval_id, principal)
        try:
            await self._store.write(Remove(approval_key(approval_id), version))
        except Conflict:
            raise ApprovalError(approval_id) from None
        return pending

    async def peek(self, approval_id: str, principal: str) -> PendingApproval:
        return (await self._find(approval_id, principal))[0]

    async def _find(self, approval_id: str, principal: str) -> tuple[PendingApproval, int]:
        row = await self._store.get(approval_key(approval_id))
        if row is None or row.data["principal"] != principal:
            raise ApprovalError(approval_id)
        return PendingApproval(**row.data), row.version


def _data(task: TaskRecord, calls: Mapping[str, CallRecord]) -> dict[str, Any]:
    return {"task": asdict(task), "calls": [asdict(call) for call in calls.values()]}


def _records(data: Mapping[str, Any]) -> tuple[TaskRecord, dict[str, CallRecord]]:
    task = {**data["task"], "strays": _judged(data["task"]["strays"])}
    calls = [
        CallRecord(
            **{
                **call,
                "attempts": tuple(Attempt(**one) for one in call["attempts"]),
                "arrivals": _judged(call["arrivals"]),
            }
        )
        for call in data["calls"]
    ]
    return TaskRecord(**task), {call.call_id: call for call in calls}


def _judged(values: list[dict[str, Any]]) -> tuple[Judged, ...]:
    return tuple(Judged(Arrival(**one["arrival"]), Verdict(one["verdict"]), one["at"]) for one in values)
