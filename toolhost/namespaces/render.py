"""The text of a result: everything that the model needs to go on, in the order in which it happened. Pure.

Above: namespaces that run code. Below: `sandboxes.spec`.
What the host says stands in square brackets on a line of its own; the rest was said by the code.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from sandboxes.codec import write_receipt
from sandboxes.spec import Cause, CauseKind, Ending, Outcome, Output, Receipt, Rung, State

NOTHING_PRINTED = "[The code ran and printed nothing visible. To see a value, print() it or put it on the last line.]"
NOTHING_FROM_COMMAND = "[The command ran and printed nothing visible.]"
FILES_SHOWN = 20

_RUNGS = {
    Rung.FIRST_INTERRUPT: "an interrupt ended it",
    Rung.SECOND_INTERRUPT: "a second interrupt ended it",
    Rung.KILL: "it ignored two interrupts, so the interpreter was killed",
}
_COMMAND_RUNGS = {**_RUNGS, Rung.KILL: "it ignored two interrupts, so it was killed"}


def render(outcome: Outcome) -> str:
    """The text of an outcome. Never empty."""
    parts = [
        _lost_before(outcome),
        _background(outcome.background),
        _output(outcome.output),
        outcome.value or "",
        outcome.error or "",
        _ending(outcome),
        *(f"[{note}]" for note in outcome.notes),
        _files(outcome),
    ]
    if not "".join(parts[2:5]).strip() and outcome.receipt.ending in (Ending.OK, Ending.RAISED):
        parts.insert(5, _silence(outcome))
    return _joined(part for part in parts if part)


def receipt_meta(receipt: Receipt) -> dict[str, Any]:
    """A receipt as plain JSON values, for `_meta` and HTTP."""
    return write_receipt(receipt)


def _joined(parts: Any) -> str:
    text = ""
    for part in parts:
        text += ("" if not text or text.endswith("\n") else "\n") + part
    return text


def _lost_before(outcome: Outcome) -> str:
    reason = outcome.state_lost_before
    if not reason:
        return ""
    sentence = reason if reason.endswith((".", "!", "?")) else f"{reason}."
    return f"[The earlier state of this session was lost: {sentence} Variables from before are not defined.]"


def _background(output: Output | None) -> str:
    text = _output(output) if output is not None else ""
    return f"[Printed after the previous call had ended:]\n{text.rstrip()}\n[End of that.]" if text.strip() else ""


def _output(output: Output) -> str:
    if not output.cut_characters:
        return output.head + output.tail
    where = ""
    if output.file:
        where = f"; {'all of it' if output.file_complete else 'as much as was kept'} is in {output.file}"
    mark = f"[… {output.cut_characters} characters cut{where} …]"
    head = output.head if not output.head or output.head.endswith("\n") else output.head + "\n"
    return f"{head}{mark}\n{output.tail.removeprefix(chr(10))}"


def _silence(outcome: Outcome) -> str:
    if outcome.exit_code is not None:
        return "" if outcome.exit_code else NOTHING_FROM_COMMAND
    return NOTHING_PRINTED if outcome.receipt.ending is Ending.OK else "[The code raised without a traceback.]"


def _ending(outcome: Outcome) -> str:
    receipt = outcome.receipt
    what = _what_happened(receipt, outcome.exit_code)
    return f"[{what}{_fate(receipt)}]" if what else ""


def _what_happened(receipt: Receipt, exit_code: int | None) -> str:
    cause = receipt.cause
    code = f" Exit code {exit_code}." if exit_code is not None else ""
    rungs = _RUNGS if exit_code is None else _COMMAND_RUNGS
    match receipt.ending:
        case Ending.OK | Ending.RAISED:
            return code.strip()
        case Ending.TIMED_OUT:
            limit = f" after {cause.limit:g} s" if cause is not None and cause.limit is not None else ""
            return f"Timed out{limit}{_rung(cause, rungs)}.{code}"
        case Ending.INTERRUPTED:
            by = "by an operator" if cause is not None and cause.kind is CauseKind.OPERATOR else "by the client"
            return f"Interrupted {by}{_rung(cause, rungs)}.{code}"
        case Ending.KILLED if cause is not None and cause.kind is CauseKind.SESSION_CLOSED:
            return "The code was ended: the session was closed."
        case Ending.KILLED:
            return f"The {'interpreter' if exit_code is None else 'command'} died: {_death(cause)}.{code}"
        case Ending.LOST:
            return f"The sandbox was lost while the code ran: {_death(cause)}."
        case Ending.NEVER_STARTED:
            return f"The code did not run{f': {_death(cause)}' if cause is not None else ''}."


def _rung(cause: Cause | None, rungs: Mapping[Rung, str]) -> str:
    return f": {rungs[cause.rung]}" if cause is not None and cause.rung is not None else ""


def _death(cause: Cause | None) -> str:
    if cause is None:
        return "for an unknown reason"
    match cause.kind:
        case CauseKind.SIGNAL:
            return f"killed by signal {cause.signal}{_signal_name(cause.signal)}"
        case CauseKind.EXIT:
            return f"it exited with code {cause.exit_code}"
        case CauseKind.OUT_OF_MEMORY:
            limit = f" (limit {cause.limit / (1 << 20):.0f} MiB)" if cause.limit else ""
            return f"out of memory{limit}"
        case CauseKind.DEADLINE:
            return "it ran out of time"
        case CauseKind.CANCEL:
            return "the client cancelled it"
        case CauseKind.OPERATOR:
            return "an operator ended it"
        case CauseKind.SANDBOX_LOST:
            return "the sandbox ended"
        case CauseKind.TRANSPORT_LOST:
            return "the connection to the sandbox broke"
        case CauseKind.SESSION_CLOSED:
            return "the session was closed"


def _signal_name(number: int | None) -> str:
    try:
        return f" ({signal.Signals(number).name})" if number is not None else ""
    except ValueError:
        return ""


def _fate(receipt: Receipt) -> str:
    if receipt.ending in (Ending.OK, Ending.RAISED):
        return ""
    if receipt.cause is not None and receipt.cause.kind is CauseKind.SESSION_CLOSED:
        return " Its variables and files are gone."
    if receipt.ending is Ending.NEVER_STARTED:
        return " Variables and files are as before." if receipt.state is State.KEPT else " Variables are lost."
    if receipt.ending is Ending.LOST:
        return " Variables are lost; files outside /mnt/data too."
    if receipt.state is State.LOST:
        return " Variables and imports are lost; files in /mnt/data are kept."
    return " Variables and files are kept."


def _files(outcome: Outcome) -> str:
    lines = [f"[Image saved as {image.path}]" for image in outcome.images]
    shown = {image.path for image in outcome.images}
    files = [file for file in outcome.files if file.path not in shown]
    lines += [f"[File written: {file.path} ({file.size} bytes)]" for file in files[:FILES_SHOWN]]
    if len(files) > FILES_SHOWN:
        lines.append(f"[… and {len(files) - FILES_SHOWN} more files]")
    return "\n".join(lines)
