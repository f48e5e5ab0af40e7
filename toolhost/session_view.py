"""A session and its receipts as JSON values, for operators and users. No secrets: a retained id is shown as a digest.

Above: `admin`, `files`. Below: sandboxes' public API, `identity`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from sandboxes.session import SessionInfo
from sandboxes.spec import KeyKind, Receipt, SessionKey
from sandboxes.stores.base import AttemptRecord
from toolhost.identity import label


class Receipts(Protocol):
    """What is needed of the session manager."""

    async def attempts(self, key: SessionKey, limit: int = 100) -> Sequence[AttemptRecord]: ...


async def view(receipts: Receipts, infos: Sequence[SessionInfo]) -> list[dict[str, Any]]:
    """Sessions, each with its last call."""
    newest = await asyncio.gather(*(receipts.attempts(info.record.key, limit=1) for info in infos))
    return [one(info, attempts) for info, attempts in zip(infos, newest, strict=True)]


def one(info: SessionInfo, attempts: Sequence[AttemptRecord]) -> dict[str, Any]:
    """Times are seconds since the epoch, `…_s` seconds, memory bytes."""
    record, now = info.record, time.time()
    key, handle = record.key, record.handle
    return {
        "session": key.digest(),
        "name": label(key),
        "principal": key.principal,
        "kind": key.kind.value,
        "id": None if key.kind is KeyKind.RETAINED else key.id,
        "retention": record.retention.value,
        "phase": info.phase.value,
        "attached": info.attached,
        "waiting": info.waiting,
        "running": info.running,
        "calls": record.calls,
        "epoch": record.epoch,
        "sequence": record.sequence,
        "created_at": record.created_at,
        "last_used_at": record.last_used_at,
        "age_s": round(max(0.0, now - record.created_at), 3),
        "idle_s": 0.0 if info.running else round(max(0.0, now - record.last_used_at), 3),
        "ttl_s": record.ttl_s,
        "lost_reason": record.lost_reason,
        "closed_at": record.closed_at,
        "close_reason": record.close_reason,
        "sandbox": None
        if handle is None
        else {
            "backend": handle.backend,
            "name": info.sandbox or handle.sandbox_id,
            "id": handle.sandbox_id,
            "node": handle.node,
        },
        "usage": info.usage and asdict(info.usage),
        "last_call": attempt(attempts[0]) if attempts else None,
    }


def attempt(known: AttemptRecord) -> dict[str, Any]:
    """An attempt by its receipt; one that has none runs still, or waits for the ledger."""
    receipt = known.receipt
    return {
        "attempt_id": known.attempt_id,
        "registered_at": known.registered_at,
        "settled": receipt is not None,
        "kept": known.outcome is not None,
        "duration_s": None if receipt is None else duration_s(receipt),
        "receipt": receipt and {**asdict(receipt), "session": label(known.session)},
    }


def duration_s(receipt: Receipt) -> float | None:
    """How long the code ran; None when it never started."""
    return None if receipt.started_at is None else round(receipt.ended_at - receipt.started_at, 6)
