"""Outcomes that the host itself writes: for what was lost with its sandbox, and for what never started.

Above: `calls`, `keeper`, `adoption`. Below: `spec`, `stores.base`.
"""

from __future__ import annotations

import dataclasses

from sandboxes.spec import Cause, CauseKind, Ending, Outcome, Output, Receipt, State
from sandboxes.stores.base import AttemptRecord, SessionRecord

LOST = Cause(CauseKind.SANDBOX_LOST)


def of_memory(outcome: Outcome, limit: int) -> Outcome:
    """The same, and its process was killed because the sandbox had used `limit` bytes of memory."""
    receipt = outcome.receipt
    cause = dataclasses.replace(receipt.cause or LOST, kind=CauseKind.OUT_OF_MEMORY, limit=limit)
    return dataclasses.replace(outcome, receipt=dataclasses.replace(receipt, cause=cause))


def lost_outcome(
    session: SessionRecord,
    attempt: AttemptRecord,
    now: float,
    *,
    note: str = "",
    printed: str = "",
    sequence: int | None = None,
    started_at: float | None = None,
    cause: Cause = LOST,
    ending: Ending = Ending.LOST,
) -> Outcome:
    """The sandbox ended before the outcome could be fetched: whether the code finished is not known. `printed` is
    what was heard of it until then."""
    receipt = Receipt(
        session=str(session.key),
        epoch=session.epoch,
        sequence=session.sequence if sequence is None else sequence,
        attempt_id=attempt.attempt_id,
        digest=attempt.digest,
        queued_at=attempt.registered_at,
        started_at=started_at,
        ended_at=now,
        ending=ending,
        state=State.LOST,
        bytes_out=len(printed.encode("utf-8", "replace")),
        cause=cause,
    )
    return Outcome(receipt, Output(printed), notes=(note,) if note else ())


def never_started_outcome(
    session: SessionRecord, attempt: AttemptRecord, now: float, note: str, *, cause: Cause | None
) -> Outcome:
    """Its code did not run. Where that is because the session was closed, what that had is gone."""
    closed = cause is not None and cause.kind is CauseKind.SESSION_CLOSED
    receipt = Receipt(
        session=str(session.key),
        epoch=session.epoch,
        sequence=session.sequence,
        attempt_id=attempt.attempt_id,
        digest=attempt.digest,
        queued_at=attempt.registered_at,
        started_at=None,
        ended_at=now,
        ending=Ending.NEVER_STARTED,
        state=State.LOST if closed else State.KEPT,
        cause=cause,
    )
    return Outcome(receipt, notes=(note,))
