"""The host's own errors, and the one table from sandboxes' errors to texts, MCP and HTTP.

Above: everything in this package. Below: `sandboxes.errors`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandboxes import errors as sandbox


class ToolhostError(Exception):
    """The root of the host's own errors. The message says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigurationError(ToolhostError):
    """A setting, or the file it stands in, cannot be used: the host does not start."""


class BadArguments(ToolhostError):
    """Arguments of a tool call that the model can correct; the message tells how."""


class Refused(ToolhostError):
    """An HTTP request that is answered with `status` instead of being served."""

    def __init__(self, status: int, message: str, *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one kind of error: its HTTP status, a stable code for programs, and advice for the model."""

    status: int
    code: str
    advice: str = ""


# From the most special to the most general: the first row whose class fits is taken.
TABLE: tuple[tuple[type[Exception], Row], ...] = (
    (sandbox.NoCapacity, Row(503, "no_capacity")),
    (sandbox.EnvironmentMissing, Row(503, "environment_missing")),
    (sandbox.IsolationUnavailable, Row(503, "isolation_unavailable")),
    (sandbox.EngineUnavailable, Row(503, "engine_unavailable", "Nothing ran. Trying again later may work.")),
    (sandbox.NodeGone, Row(503, "state_lost", "Variables are lost. The next call starts anew.")),
    (sandbox.StateLost, Row(503, "state_lost", "Variables are lost. The next call starts anew.")),
    (sandbox.BackendError, Row(503, "backend_error", "Nothing ran. Trying again later may work.")),
    (sandbox.WireError, Row(502, "sandbox_error", "It is not known whether the code ran. Check its effects first.")),
    (
        sandbox.ChannelLost,
        Row(502, "channel_lost", "The code may still run. Check its effects before you run it again."),
    ),
    (sandbox.FileMissing, Row(404, "file_unknown")),
    (sandbox.FileTooLarge, Row(413, "file_too_large")),
    (sandbox.CallRefused, Row(400, "call_refused")),
    (sandbox.AttemptConflict, Row(409, "attempt_conflict")),
    (sandbox.AttemptExpired, Row(410, "attempt_expired")),
    (sandbox.AttemptUnknown, Row(404, "attempt_unknown")),
    (sandbox.SessionUnknown, Row(404, "session_unknown")),
    (sandbox.IllegalTransition, Row(409, "session_state", "Trying again may work.")),
    (sandbox.StoreConflict, Row(409, "session_changed", "Nothing ran. Trying again may work.")),
    (sandbox.StoreUnavailable, Row(503, "ledger_unavailable", "Nothing ran. Trying again later may work.")),
    (BadArguments, Row(400, "bad_arguments")),
)

# What the machine says of itself names its places. They are the operator's, who has the log; no caller is told them.
_OF_THE_MACHINE = (sandbox.BackendError, sandbox.StoreUnavailable)
_PLACE = re.compile(r"(?<![\w/.:])/(?!mnt/data\b)[^\s,;:()'\"]+|\b[a-z]+:///[^\s,;:()'\"]+")
HIDDEN = "(a place on the host)"

UNEXPECTED = Row(500, "internal_error", "This is a fault of the tool host, not of the code. Trying again may work.")


def row(error: BaseException) -> Row:
    """The table's row for an error; `UNEXPECTED` for what the table does not know."""
    for kind, found in TABLE:
        if isinstance(error, kind):
            return found
    return UNEXPECTED


def text_for(error: BaseException) -> str:
    """What the model reads. Never empty; an unexpected error's own words stay in the log."""
    found = row(error)
    if found is UNEXPECTED:
        return f"Error: the tool host failed. {found.advice}"
    message = _told(error) or found.code.replace("_", " ")
    parts = [f"Error: {message}"]
    if isinstance(error, sandbox.NoCapacity):
        parts.append(f"Nothing ran. Retry in {max(1, round(error.retry_after_s))} s.")
    if found.advice:
        parts.append(found.advice)
    return " ".join(part if part.endswith((".", "!", "?")) else f"{part}." for part in parts)


def _told(error: BaseException) -> str:
    """The message without places of the machine."""
    message: str = getattr(error, "message", "")
    return _PLACE.sub(HIDDEN, message) if isinstance(error, _OF_THE_MACHINE) else message


def http_for(error: BaseException) -> tuple[int, dict[str, object], tuple[tuple[str, str], ...]]:
    """Status, JSON body and headers of an error over HTTP."""
    if isinstance(error, Refused):
        return error.status, {"error": {"code": "refused", "message": error.message}}, error.headers
    found = row(error)
    message = _told(error) if found is not UNEXPECTED else "the tool host failed"
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, sandbox.NoCapacity):
        retry_s = max(1, round(error.retry_after_s))
        headers, message = (("retry-after", str(retry_s)),), f"{message}; retry in {retry_s} s"
    return found.status, {"error": {"code": found.code, "message": message}}, headers
