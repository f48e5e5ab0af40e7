"""What a dead host has left, judged from the engine, the agents' tickets and the ledger. No host is needed, and none
may run.

Above: `toolhost sessions prune`. Below: the contracts of backends and stores, `client`, `owner`.

An orphan is a sandbox that no next start of the host would keep: nobody's, or of a session that is over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from sandboxes.backends.base import Backend
from sandboxes.client import AgentClient, Hello
from sandboxes.errors import SandboxError, StateLost, StoreUnavailable, WireError
from sandboxes.lifecycle import CloseReason, Phase
from sandboxes.owner import Owner
from sandboxes.receipts import lost_outcome
from sandboxes.session import claim_text
from sandboxes.settings import ManagerSettings
from sandboxes.spec import Handle, Retention
from sandboxes.starter import workspace_name
from sandboxes.stores.base import SessionFilter, SessionRecord, Store

AT_ONCE = 16
ASK_S = 10.0


class Verdict(enum.StrEnum):
    ORPHAN = "orphan"
    HELD = "held"  # the next start would take it up
    UNKNOWN = "unknown"  # the ledger could not be read


@dataclass(frozen=True, slots=True)
class Left:
    """One sandbox. `record`: the open session that it belongs to. `keeps_files`: that session goes on without it."""

    handle: Handle
    verdict: Verdict
    why: str
    record: SessionRecord | None = None
    keeps_files: bool = False


async def survey(
    backend: Backend, store: Store | None, owner: Owner, settings: ManagerSettings, now: float
) -> Sequence[Left]:
    """Every sandbox of this owner. `backend` and `store` are open; no store: the ledger cannot be read.

    Raises EngineUnavailable.
    """
    handles = await backend.list_owned()
    records: dict[str, SessionRecord] = {}
    if store is not None:
        try:
            found = await store.list(SessionFilter(limit=1_000_000))
            records = {claim_text(record): record for record in found}
        except StoreUnavailable:
            store = None
    if store is None:
        return [Left(handle, Verdict.UNKNOWN, "the ledger cannot be read") for handle in handles]
    gate = asyncio.Semaphore(AT_ONCE)

    async def look(handle: Handle) -> Left:
        async with gate:
            hello, ended = await _ask(backend, handle)
        return _judge(handle, _record(owner, handle, hello, records), hello, ended, settings, now)

    return await asyncio.gather(*(look(handle) for handle in handles))


async def remove(backend: Backend, store: Store | None, left: Left, now: float) -> None:
    """Ends a sandbox, and its session with it unless that goes on. Raises EngineUnavailable, StoreUnavailable."""
    await backend.destroy(left.handle, keep_workspace=left.keeps_files)
    record = left.record
    if record is None or store is None or left.keeps_files:
        return
    for attempt in await store.attempts(record.key, limit=10_000, unsettled=True):
        await store.settle(dataclasses.replace(attempt, outcome=lost_outcome(record, attempt, now)))
    closed = dataclasses.replace(
        record, phase=Phase.CLOSED.value, closed_at=now, close_reason=CloseReason.OPERATOR.value, handle=None
    )
    await store.put(closed, expected_version=record.version)


async def _ask(backend: Backend, handle: Handle) -> tuple[Hello | None, bool]:
    """What the agent says of itself, if it answers; and whether the sandbox has ended."""
    try:
        async with asyncio.timeout(ASK_S):
            client = await AgentClient.connect(await backend.connect(handle))
    except (StateLost, WireError):
        return None, True
    except (SandboxError, TimeoutError):
        return None, False
    await client.close()
    return client.hello, False


def _record(
    owner: Owner, handle: Handle, hello: Hello | None, records: dict[str, SessionRecord]
) -> SessionRecord | None:
    """The open session that a sandbox belongs to: by its ticket, or where it does not answer by what is on record."""
    if hello is not None:
        if hello.claim is None:
            return None
        ticket, claim = hello.claim
        return records.get(claim) if owner.check_ticket(ticket, handle.sandbox_id, claim) else None
    for record in records.values():
        if record.handle is not None and record.handle.sandbox_id == handle.sandbox_id:
            return record
        if handle.workspace in (record.workspace, workspace_name(record)):
            return record
    return None


def _judge(
    handle: Handle,
    record: SessionRecord | None,
    hello: Hello | None,
    ended: bool,
    settings: ManagerSettings,
    now: float,
) -> Left:
    if record is None:
        return Left(handle, Verdict.ORPHAN, "no open session claims it")
    over = None if hello is not None and hello.running is not None else _over(record, settings, now)
    if over is not None:
        return Left(handle, Verdict.ORPHAN, over, record)
    if ended:
        return Left(handle, Verdict.ORPHAN, "it has ended; its session goes on with its files", record, True)
    return Left(handle, Verdict.HELD, "the next start of the host takes it up", record)


def _over(record: SessionRecord, settings: ManagerSettings, now: float) -> str | None:
    """Why the session would be closed by the next start of the host, or soon after; None when it would not."""
    if record.phase == Phase.CLOSING:
        return "its session was being closed"
    if record.retention is Retention.CONNECTION:
        return "its connection ended with the host"
    if now >= record.created_at + settings.lifetime_s:
        return "its session is over its lifetime"
    if now >= record.last_used_at + (settings.idle_s if record.ttl_s is None else record.ttl_s):
        return "its session was idle for too long"
    if record.retention is Retention.REQUEST and now >= record.last_used_at + settings.grace_s:
        return "its client went with the host"
    return None
