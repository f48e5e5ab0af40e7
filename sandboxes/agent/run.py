"""One execution, from its request to its result frame. Plain data with the few rules that hold for both kinds.

Above: `executions`. Below: `output`, `wire`.
"""

from __future__ import annotations

import time

from . import wire
from .output import Capture

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .ladder import Ladder
    from .loop import Timer
    from .spool import Spool

_NOTES = 20
_NOTE_CHARACTERS = 1000
_IMAGES = 20
_FILES = 50
# The most that the interpreter adds to a value or an error that it has cut: the line that says so.
_MARK = 100


_NOTHING = Capture(1)
_SILENCE = _NOTHING.frame()
_LONGEST = wire.MAX_FRAME_TO_HOST - 1024  # of a result, without its id


class Run:
    """What was asked, and what is known of it so far."""

    def __init__(
        self, attempt: str, digest: str, kind: str, call: dict[str, object], timeout: float, cap: int, queued: float
    ) -> None:
        self.attempt = attempt
        self.digest = digest
        self.kind = kind
        self.call = call
        self.timeout = timeout
        self.cap = cap
        self.queued_at = queued
        self.sequence = 0
        self.epoch = 0
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.ending = "never_started"
        self.state = "kept"
        self.why: str | None = None  # who climbs the ladder: "deadline", "cancel", "operator"
        self.why_note: str | None = None
        self.cause: dict[str, object] | None = None
        self.capture = _NOTHING  # until it starts
        self.streamed = 0
        self.spool: Spool | None = None
        self.ladder: Ladder | None = None
        self.deadline: Timer | None = None
        self.value: str | None = None
        self.error: str | None = None
        self.images: list[dict[str, str]] = []
        self.files: list[dict[str, object]] = []
        self.looked = False  # whoever ran it has looked for changed files, and `files` are those
        self.exit_code: int | None = None
        self.notes: list[str] = []
        self.state_lost_before: str | None = None
        self.file: str | None = None
        self.file_complete = True

    def note(self, sentence: object) -> None:
        if isinstance(sentence, str) and sentence and len(self.notes) < _NOTES:
            self.notes.append(sentence[:_NOTE_CHARACTERS])

    def escaped(self) -> None:
        """It says that it ended by itself: so it is, if the ladder has only interrupted it. The second rung ends what
        it started too, and may so have ended it."""
        if self.ladder is not None and self.ladder.reached < 1:
            self.why = None

    def stopped(self, state: str) -> None:
        """The ladder ended it."""
        self.ending = "timed_out" if self.why == "deadline" else "interrupted"
        self.state = state
        self.note(self.why_note)
        self._because(self.why or "operator", limit=self.timeout if self.why == "deadline" else None)

    def died(self, status: int, out_of_memory: int | None, state: str) -> None:
        """Its process ended by itself; `status` is what wait(2) said."""
        self.ending = "killed"
        self.state = state
        signal, code = status & 0x7F, status >> 8
        if out_of_memory is not None:
            self._because("out_of_memory", signal=signal or None, limit=out_of_memory)
        elif signal:
            self._because("signal", signal=signal)
        else:
            self._because("exit", exit_code=code)

    def _because(self, kind: str, **more: float | None) -> None:
        rung = self.ladder.rung if self.ladder is not None else None
        self.cause = {"kind": kind, "rung": rung, "signal": None, "exit_code": None, "limit": None, **more}

    def result(self, session: str, background: dict[str, object] | None) -> bytes:
        """The line of the result frame without an id, small enough for the host to take."""
        capture, value, error = self.capture, self.value, self.error
        silent = capture.bytes_out == 0
        frame: dict[str, object] = {
            "t": "result",
            "receipt": {
                "session": session,
                "epoch": self.epoch,
                "sequence": self.sequence,
                "attempt_id": self.attempt,
                "digest": self.digest,
                "queued_at": self.queued_at,
                "started_at": self.started_at,
                "ended_at": self.ended_at or time.time(),
                "ending": self.ending,
                "state": self.state,
                "bytes_out": capture.bytes_out,
                "bytes_cut": 0 if silent else capture.bytes_cut,
                "cause": self.cause,
            },
            "output": _SILENCE if silent else capture.frame(self.file, self.file_complete),
            "background": background,
            "value": value if value is None or len(value) <= self.cap else _shorten(value, self.cap),
            "error": error if error is None or len(error) <= self.cap else _shorten(error, self.cap),
            "images": self.images,
            "files": self.files[:_FILES],
            "exit_code": self.exit_code,
            "notes": self.notes,
            "state_lost_before": self.state_lost_before,
        }
        line = wire.encode(frame)
        return line if len(line) <= _LONGEST else _fit(frame, line)


def images(value: object, data: str) -> list[dict[str, str]]:
    """Those of a list of {path, mime} that have the shape of an image below `data`."""
    good: list[dict[str, str]] = []
    for item in value if isinstance(value, list) else []:
        if not isinstance(item, dict):
            continue
        path, mime = item.get("path"), item.get("mime")
        if not isinstance(path, str) or not isinstance(mime, str) or len(path) > 1024 or len(mime) > 64:
            continue
        if path.startswith(data + "/") and "\0" not in path and "/../" not in path and mime.startswith("image/"):
            good.append({"path": path, "mime": mime})
    return good[:_IMAGES]


def _shorten(text: str | None, cap: int) -> str | None:
    if text is None or len(text) <= cap + _MARK:  # not cut twice: the count in the mark would go
        return text
    half = cap // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[len(text) - half :]}"


def _fit(frame: dict[str, object], line: bytes) -> bytes:
    """Texts outside of ASCII take up to 12 bytes a character on the wire: what does not fit is cut further."""
    cap = wire.MAX_CAP
    while len(line) > _LONGEST and cap > 100:
        cap //= 2
        for key in ("output", "background"):
            output = frame[key]
            if isinstance(output, dict):
                _shrink(output, cap)
        for key in ("value", "error"):
            text = frame[key]
            if isinstance(text, str):
                frame[key] = _shorten(text, cap)
        if cap < 1000:
            frame["files"], frame["images"] = [], []
        line = wire.encode(frame)
    return line


def _shrink(output: dict[str, object], cap: int) -> None:
    head, tail, cut = output["head"], output["tail"], output["cut_characters"]
    if not isinstance(head, str) or not isinstance(tail, str) or not isinstance(cut, int):
        return
    if len(head) + len(tail) <= cap:
        return
    whole = head + tail if not cut else head
    tail = tail if cut else whole[len(head) // 2 :]
    head = head if cut else whole[: len(head) // 2]
    before = len(head) + len(tail)
    head, tail = head[: cap // 2], tail[max(0, len(tail) - cap // 2) :]
    output.update(head=head, tail=tail, cut_characters=cut + before - len(head) - len(tail))
