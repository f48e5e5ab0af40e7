"""A session record as JSON text and back. The columns that stores search by are theirs; this is the rest."""

from __future__ import annotations

import json

from sandboxes import codec
from sandboxes.spec import KeyKind, Outcome, Receipt, Retention, SessionKey
from sandboxes.stores.base import SessionRecord


def write_record(record: SessionRecord) -> str:
    return json.dumps(
        {
            "principal": record.key.principal,
            "kind": record.key.kind,
            "id": record.key.id,
            "retention": record.retention,
            "phase": record.phase,
            "incarnation": record.incarnation,
            "created_at": record.created_at,
            "last_used_at": record.last_used_at,
            "ttl_s": record.ttl_s,
            "epoch": record.epoch,
            "sequence": record.sequence,
            "handle": None if record.handle is None else codec.write_handle(record.handle),
            "workspace": record.workspace,
            "node": record.node,
            "lost_reason": record.lost_reason,
            "closed_at": record.closed_at,
            "close_reason": record.close_reason,
            "calls": record.calls,
        }
    )


def read_record(text: str, version: int) -> SessionRecord:
    """Raises ValueError when the text is not a record."""
    fields = codec.mapping(json.loads(text), "record")
    handle = fields.get("handle")
    return SessionRecord(
        key=SessionKey(codec.text(fields, "principal"), KeyKind(codec.text(fields, "kind")), codec.text(fields, "id")),
        retention=Retention(codec.text(fields, "retention")),
        phase=codec.text(fields, "phase"),
        incarnation=codec.text(fields, "incarnation"),
        created_at=codec.number(fields, "created_at"),
        last_used_at=codec.number(fields, "last_used_at"),
        ttl_s=_number(fields, "ttl_s"),
        epoch=codec.count(fields, "epoch"),
        sequence=codec.count(fields, "sequence"),
        handle=None if handle is None else codec.read_handle(handle),
        workspace=codec.optional_text(fields, "workspace"),
        node=codec.name(fields, "node", ""),
        lost_reason=codec.optional_text(fields, "lost_reason"),
        closed_at=_number(fields, "closed_at"),
        close_reason=codec.optional_text(fields, "close_reason"),
        calls=codec.count(fields, "calls"),
        version=version,
    )


def write_outcome(outcome: Outcome) -> str:
    """Without its receipt, which is kept longer."""
    fields = codec.write_outcome(outcome)
    del fields["receipt"]
    return json.dumps(fields)


def read_outcome(text: str, receipt: str) -> Outcome:
    return codec.read_outcome({**json.loads(text), "receipt": json.loads(receipt)})


def write_receipt(receipt: Receipt) -> str:
    return json.dumps(codec.write_receipt(receipt))


def read_receipt(text: str) -> Receipt:
    return codec.read_receipt(json.loads(text))


def _number(fields: codec.Fields, field: str) -> float | None:
    return None if fields.get(field) is None else codec.number(fields, field)
