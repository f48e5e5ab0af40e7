"""At start: what an earlier process of this host left running is taken up again, and the rest is removed.

Above: `manager`. Below: `keeper`, `calls`, `starter`, `sandbox`.

Every sandbox that the backend lists as this owner's is asked for its ticket. A valid ticket for a session that the
ledger has open makes it that session's, with its variables. Two such sandboxes for one session are quarantined, both:
neither answers, the session is closed as failed, and the next call begins anew. They are removed when the host stops
or starts again. All others are ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandboxes.calls import Calls
from sandboxes.client import Hello
from sandboxes.errors import EngineUnavailable, SandboxError, StateLost, WireError
from sandboxes.keeper import Keeper
from sandboxes.lifecycle import OVER, CloseReason, Phase
from sandboxes.sandbox import Sandbox
from sandboxes.session import Session, claim_text
from sandboxes.spec import Handle, Retention
from sandboxes.starter import Starter
from sandboxes.stores.base import SessionFilter, SessionRecord

AT_ONCE = 16
ASKS = 3  # of the engine, each with its deadline
GONE = "the sandbox did not outlive a stop of the tool host; variables are lost, files are kept"


@dataclass(slots=True)
class Adopted:
    """What was found. `quarantined`: kept away from everybody, and removed at the stop."""

    sessions: int = 0
    lost: int = 0
    removed: int = 0
    quarantined: list[Handle] = field(default_factory=list)


@dataclass(slots=True)
class _Claim:
    sandbox: Sandbox
    hello: Hello | None  # None: it runs, is known as this session's, and does not answer yet


async def adopt(keeper: Keeper, calls: Calls, starter: Starter) -> Adopted:
    """Raises EngineUnavailable or StoreUnavailable: then the host does not start."""
    adopted = Adopted()
    handles = await _owned(keeper)
    records = {claim_text(record): record for record in await keeper.store.list(SessionFilter(limit=1_000_000))}
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(handle: Handle) -> tuple[str, _Claim] | Handle:
        async with gate:
            return await _ask(keeper, handle, records)

    claims: dict[str, list[_Claim]] = {}
    unclaimed: list[Handle] = []
    for answer in await asyncio.gather(*(ask(handle) for handle in handles)):
        if isinstance(answer, Handle):
            unclaimed.append(answer)
        else:
            claims.setdefault(answer[0], []).append(answer[1])
    keeper.doomed.update({handle.sandbox_id: (handle, False) for handle in unclaimed})

    for claim, record in records.items():
        await _take_up(keeper, calls, starter, record, claims.get(claim, []), adopted)
    await asyncio.gather(*(_remove(keeper, handle, gate) for handle in unclaimed))
    adopted.removed = len(unclaimed)
    return adopted


async def _owned(keeper: Keeper) -> Sequence[Handle]:
    """Asks more than once: an engine that is busy when a host starts, as after a crash of both, answers in the end."""
    for _ in range(ASKS - 1):
        try:
            return await keeper.engine.list_owned()
        except EngineUnavailable as error:
            keeper.observer.failed("adoption", error)
    return await keeper.engine.list_owned()


async def _ask(keeper: Keeper, handle: Handle, records: dict[str, SessionRecord]) -> tuple[str, _Claim] | Handle:
    """The claim that a sandbox proves to have, or its handle when it is nobody's."""
    sandbox = Sandbox(keeper.engine, handle)
    try:
        hello = (await sandbox.client()).hello
    except (StateLost, WireError):
        return handle
    except SandboxError as error:
        keeper.observer.failed("adoption", error)
        for claim, record in records.items():
            if record.handle == handle and record.phase != Phase.CLOSING:
                return claim, _Claim(sandbox, None)
        return handle
    if hello.claim is not None:
        ticket, claim = hello.claim
        valid = keeper.owner.check_ticket(ticket, handle.sandbox_id, claim)
        if valid and claim in records and records[claim].phase != Phase.CLOSING:
            return claim, _Claim(sandbox, hello)
    await sandbox.close()
    return handle


async def _remove(keeper: Keeper, handle: Handle, gate: asyncio.Semaphore) -> None:
    keep = any(s.record.workspace == handle.workspace for s in keeper.sessions.values() if s.phase not in OVER)
    async with gate:
        await keeper.destroy(Sandbox(keeper.engine, handle), keep_workspace=keep)


async def _take_up(
    keeper: Keeper, calls: Calls, starter: Starter, record: SessionRecord, claims: list[_Claim], adopted: Adopted
) -> None:
    if record.phase == Phase.CLOSING:
        _finish_closing(keeper, record)
        return
    if len(claims) == 1:
        session = _with_sandbox(keeper, starter, record, claims[0])
        await _settle_from(keeper, calls, session, claims[0].hello)
        adopted.sessions += 1
    else:
        session = await _without_sandbox(keeper, record)
        adopted.lost += session.phase is Phase.LOST
    if claims[1:]:
        for claim in claims:
            await claim.sandbox.close()
            adopted.quarantined.append(claim.sandbox.handle)
            keeper.busy_ids.add(claim.sandbox.handle.sandbox_id)
        epochs = [claim.hello.epoch for claim in claims if claim.hello is not None]
        session.update(workspace=None, epoch=max([session.record.epoch, *epochs]))  # what is set aside may use it
        keeper.close(session, CloseReason.FAILED)
    elif record.retention is Retention.CONNECTION:
        keeper.close(session, CloseReason.DISCONNECT)
    elif record.retention is Retention.REQUEST:
        session.grace_until = keeper.clock.now() + keeper.settings.grace_s
    keeper.save_soon(session)


def _finish_closing(keeper: Keeper, record: SessionRecord) -> None:
    """The host stopped while it closed this one: its sandbox is among the unclaimed, its record is closed now."""
    session = keeper.adopt(dataclasses.replace(record, phase=Phase.LOST.value))
    try:
        reason = CloseReason(record.close_reason or "")
    except ValueError:
        reason = CloseReason.FAILED
    keeper.close(session, reason)


def _with_sandbox(keeper: Keeper, starter: Starter, record: SessionRecord, claim: _Claim) -> Session:
    handle, hello = claim.sandbox.handle, claim.hello
    session = keeper.adopt(dataclasses.replace(record, phase=Phase.IDLE.value))
    session.update(
        handle=handle,
        workspace=handle.workspace,
        epoch=max(record.epoch, hello.epoch if hello else 0),
        sequence=max(record.sequence, hello.sequence if hello else 0),
    )
    session.sandbox = claim.sandbox
    session.slot = keeper.admission.adopt(record.key.principal)
    starter.examine_when_lost(session, claim.sandbox)
    return session


async def _settle_from(keeper: Keeper, calls: Calls, session: Session, hello: Hello | None) -> None:
    """What ran when the host stopped, and what it never heard of the end of, goes into the ledger."""
    unsettled = {a.attempt_id: a for a in await keeper.store.attempts(session.key, limit=10_000, unsettled=True)}
    inside = [] if hello is None else [*hello.kept, *([hello.running] if hello.running is not None else [])]
    for attempt_id in dict.fromkeys([*inside, *unsettled]):
        known = unsettled.get(attempt_id)
        calls.take_over(
            session, attempt_id, known.digest if known else "", known.registered_at if known else keeper.clock.now()
        )


async def _without_sandbox(keeper: Keeper, record: SessionRecord) -> Session:
    if record.phase == Phase.NEW and not await keeper.store.attempts(record.key, limit=1, unsettled=True):
        return keeper.adopt(record)  # else it had a sandbox, and the host died before it wrote that down
    session = keeper.adopt(dataclasses.replace(record, phase=Phase.LOST.value))
    newest = await keeper.store.attempts(record.key, limit=20)
    receipts = [attempt.receipt for attempt in newest if attempt.receipt is not None]
    session.update(
        handle=None,
        epoch=max([record.epoch, *(receipt.epoch for receipt in receipts)]),
        sequence=max([record.sequence, *(receipt.sequence for receipt in receipts)]),
        lost_reason=GONE if session.record.epoch else record.lost_reason,
    )
    await keeper.settle_lost(session)
    return session
