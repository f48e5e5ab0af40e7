"""Outcomes, receipts and handles as JSON objects, and back. Reading checks every field: what is read may be hostile.

Above: `client` (results that an agent sends) and the stores. Below: `spec`.
`read_*` raise ValueError naming the field. Text comes back as valid Unicode: a lone surrogate, which JSON can carry and
UTF-8 cannot, is replaced, so that nothing further up can fail on encoding it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from sandboxes.spec import (
    Cause,
    CauseKind,
    Ending,
    FileRef,
    Handle,
    ImageRef,
    Outcome,
    Output,
    Receipt,
    Rung,
    State,
)

T = TypeVar("T")
Fields = Mapping[str, object]

MAX_ITEMS = 1000  # images, files or notes of one outcome
MAX_NAME = 4096  # characters of a path, an id or a kind
MAX_COUNT = 1 << 53  # larger integers are not exact in JSON


def write_outcome(outcome: Outcome) -> dict[str, object]:
    """The object that `read_outcome` reads."""
    # By hand: `dataclasses.asdict` copies deeply, and this is done for every execution.
    return {
        "receipt": write_receipt(outcome.receipt),
        "output": _write_output(outcome.output),
        "value": outcome.value,
        "error": outcome.error,
        "background": None if outcome.background is None else _write_output(outcome.background),
        "images": [{"path": image.path, "mime": image.mime} for image in outcome.images],
        "files": [{"path": file.path, "size": file.size} for file in outcome.files],
        "exit_code": outcome.exit_code,
        "notes": list(outcome.notes),
        "state_lost_before": outcome.state_lost_before,
    }


def write_receipt(receipt: Receipt) -> dict[str, object]:
    return {
        "session": receipt.session,
        "epoch": receipt.epoch,
        "sequence": receipt.sequence,
        "attempt_id": receipt.attempt_id,
        "digest": receipt.digest,
        "queued_at": receipt.queued_at,
        "started_at": receipt.started_at,
        "ended_at": receipt.ended_at,
        "ending": receipt.ending.value,  # encoders are slow with members of an enumeration
        "state": receipt.state.value,
        "bytes_out": receipt.bytes_out,
        "bytes_cut": receipt.bytes_cut,
        "cause": None if receipt.cause is None else dataclasses.asdict(receipt.cause),
    }


def _write_output(output: Output) -> dict[str, object]:
    return {
        "head": output.head,
        "tail": output.tail,
        "cut_characters": output.cut_characters,
        "file": output.file,
        "file_complete": output.file_complete,
    }


def read_outcome(value: object, session: str | None = None, digest: str | None = None) -> Outcome:
    """`session`, `digest`: what the receipt says of them, where the reader knows better than the writer."""
    fields = mapping(value, "outcome")
    return Outcome(
        receipt=read_receipt(fields.get("receipt"), session, digest),
        output=_read_output(fields.get("output"), "output"),
        value=optional_text(fields, "value"),
        error=optional_text(fields, "error"),
        background=_optional(fields.get("background"), lambda v: _read_output(v, "background")),
        images=_items(fields, "images", _read_image),
        files=_items(fields, "files", _read_file),
        exit_code=_optional_integer(fields, "exit_code"),
        notes=_items(fields, "notes", lambda v: _clean(v, "notes")),
        state_lost_before=optional_text(fields, "state_lost_before"),
    )


def read_receipt(value: object, session: str | None = None, digest: str | None = None) -> Receipt:
    """See `read_outcome`."""
    fields = mapping(value, "receipt")
    started = fields.get("started_at")
    told, told_digest = name(fields, "session"), name(fields, "digest")
    return Receipt(
        session=told if session is None else session,
        epoch=count(fields, "epoch"),
        sequence=count(fields, "sequence"),
        attempt_id=name(fields, "attempt_id"),
        digest=told_digest if digest is None else digest,
        queued_at=number(fields, "queued_at"),
        started_at=None if started is None else number(fields, "started_at"),
        ended_at=number(fields, "ended_at"),
        ending=_choice(Ending, fields.get("ending"), "ending"),
        state=_choice(State, fields.get("state"), "state"),
        bytes_out=count(fields, "bytes_out", 0),
        bytes_cut=count(fields, "bytes_cut", 0),
        cause=_optional(fields.get("cause"), _read_cause),
    )


def write_handle(handle: Handle) -> dict[str, object]:
    return dataclasses.asdict(handle)


def read_handle(value: object) -> Handle:
    fields = mapping(value, "handle")
    parts = {key: name(fields, key) for key in ("backend", "key", "sandbox_id", "instance", "workspace")}
    return Handle(**parts, node=name(fields, "node", ""), created_at=number(fields, "created_at", 0.0))


# --- one field -----------------------------------------------------------------------------------------------------


def mapping(value: object, field: str) -> Fields:
    if not isinstance(value, dict):
        raise ValueError(f"{field}: not an object")
    return value


def name(fields: Fields, field: str, default: str | None = None) -> str:
    """A short text: an id, a path."""
    value = fields.get(field, default)
    if type(value) is str and len(value) <= MAX_NAME and value.isascii():  # nearly always
        return value
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise ValueError(f"{field}: not a text of at most {MAX_NAME} characters")
    return _clean(value, field)


def optional_text(fields: Fields, field: str) -> str | None:
    value = fields.get(field)
    return None if value is None else _clean(value, field)


def text(fields: Fields, field: str, default: str | None = None) -> str:
    return _clean(fields.get(field, default), field)


def count(fields: Fields, field: str, default: int | None = None) -> int:
    value = fields.get(field, default)
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return value
    found = _integer(value, field)
    if found < 0:
        raise ValueError(f"{field}: negative")
    return found


def number(fields: Fields, field: str, default: float | None = None) -> float:
    value = fields.get(field, default)
    if type(value) is float and -MAX_COUNT <= value <= MAX_COUNT:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field}: not a number")
    if not math.isfinite(value) or abs(value) > MAX_COUNT:
        raise ValueError(f"{field}: out of range")
    return float(value)


def _integer(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_COUNT:
        raise ValueError(f"{field}: not an integer in range")
    return value


def _optional_integer(fields: Fields, field: str) -> int | None:
    return _optional(fields.get(field), lambda value: _integer(value, field))


def _optional(value: object, read: Callable[[object], T]) -> T | None:
    return None if value is None else read(value)


def _clean(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field}: not a text")
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return value


def _items(fields: Fields, field: str, read: Callable[[object], T]) -> tuple[T, ...]:
    value = fields.get(field)
    if value == [] or (value is None and field not in fields):
        return ()
    if not isinstance(value, list | tuple) or len(value) > MAX_ITEMS:
        raise ValueError(f"{field}: not a list of at most {MAX_ITEMS}")
    return tuple(read(item) for item in value)


C = TypeVar("C", Ending, State, CauseKind, Rung)


def _choice(kind: type[C], value: object, field: str) -> C:
    if not isinstance(value, str):
        raise ValueError(f"{field}: not a text")
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{field}: not one of the known values") from None


def _read_cause(value: object) -> Cause:
    fields = mapping(value, "cause")
    limit = fields.get("limit")
    return Cause(
        kind=_choice(CauseKind, fields.get("kind"), "cause.kind"),
        rung=_optional(fields.get("rung"), lambda v: _choice(Rung, v, "cause.rung")),
        signal=_optional_integer(fields, "signal"),
        exit_code=_optional_integer(fields, "exit_code"),
        limit=None if limit is None else number(fields, "limit"),
    )


def _read_output(value: object, field: str) -> Output:
    fields = mapping(value, field)
    file = fields.get("file")
    complete = fields.get("file_complete", True)
    if not isinstance(complete, bool):
        raise ValueError(f"{field}.file_complete: not a boolean")
    return Output(
        head=text(fields, "head", ""),
        tail=text(fields, "tail", ""),
        cut_characters=count(fields, "cut_characters", 0),
        file=None if file is None else name(fields, "file"),
        file_complete=complete,
    )


def _read_image(value: object) -> ImageRef:
    fields = mapping(value, "images")
    return ImageRef(path=name(fields, "path"), mime=name(fields, "mime"))


def _read_file(value: object) -> FileRef:
    fields = mapping(value, "files")
    return FileRef(path=name(fields, "path"), size=count(fields, "size"))
