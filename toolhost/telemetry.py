"""Structured logs: one line an event, its facts as fields. Never code, output or secrets at info level.

Above: everything that logs (through `logging`). Below: `config`, `identity` (how a session is named).
A record's facts are in `extra={"fields": {...}}`: session, namespace, attempt, epoch and so on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

from sandboxes.lifecycle import Changed, Phase
from sandboxes.spec import Receipt, SessionKey
from toolhost.config import LogSettings
from toolhost.identity import label

_TOLD = frozenset({Phase.LOST, Phase.CLOSED})


sessions_log = logging.getLogger("toolhost.sessions")


class LogObserver:
    """What sessions do, as log lines (see `sandboxes.observer.Observer`). Calls are logged where they are answered."""

    def session_changed(self, key: SessionKey, changed: Changed) -> None:
        level = logging.INFO if changed.target in _TOLD else logging.DEBUG
        if sessions_log.isEnabledFor(level):
            fields = {
                "session": label(key),
                "from": changed.source.value,
                "to": changed.target.value,
                "reason": changed.reason or None,
            }
            sessions_log.log(level, "session", extra={"fields": fields})

    def sandbox_started(self, key: SessionKey, source: str, duration_s: float) -> None:
        if sessions_log.isEnabledFor(logging.INFO):
            fields = {"session": label(key), "source": source, "ms": round(duration_s * 1000, 1)}
            sessions_log.info("sandbox started", extra={"fields": fields})

    def queued(self, key: SessionKey, what: str, duration_s: float) -> None:
        if sessions_log.isEnabledFor(logging.DEBUG):
            fields = {"session": label(key), "for": what, "ms": round(duration_s * 1000, 1)}
            sessions_log.debug("queued", extra={"fields": fields})

    def execution_ended(self, key: SessionKey, receipt: Receipt) -> None:
        if sessions_log.isEnabledFor(logging.DEBUG):
            fields = {"session": label(key), "attempt": receipt.attempt_id, "epoch": receipt.epoch}
            sessions_log.debug("execution ended", extra={"fields": {**fields, "ending": receipt.ending.value}})

    def engine_call(self, operation: str, duration_s: float, error: str) -> None:
        if error:
            fields = {"operation": operation, "ms": round(duration_s * 1000, 1), "error": error}
            sessions_log.warning("engine call failed", extra={"fields": fields})

    def failed(self, where: str, error: BaseException) -> None:
        fields = {"where": where, "error": type(error).__name__}
        sessions_log.warning("%s", error, extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """A JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """`time level event name=value …`; values that came from outside are quoted, so a line stays a line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        facts = getattr(record, "fields", {})
        parts = [time, f"{record.levelname.lower():7}", _quoted(record.getMessage(), spaces=True)]
        parts += [f"{name}={_quoted(str(value))}" for name, value in facts.items() if value is not None]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Handler(logging.StreamHandler[TextIO]):
    """Logs that cannot be written are lost; the host goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            unread(self.stream, error)
        else:
            super().handleError(record)


def unread(stream: TextIO, error: OSError) -> None:
    """After a write that failed. Where the pipe is broken nothing more is written: what is left in the stream's buffer
    would fail again with every write, and make Python end with code 120."""
    if not isinstance(error, BrokenPipeError):
        return  # a disk that is full may have room again
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def configure(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Sends the logs of this process to `stream` (stderr), replacing earlier handlers. Called once by commands."""
    target = sys.stderr if stream is None else stream
    text = settings.format == "text" or (settings.format == "auto" and target.isatty())
    handler = _Handler(target)
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("toolhost", "sandboxes"):
        logging.getLogger(name).setLevel(settings.level.upper())
    # The SDK logs bodies of messages, which are users' code, at debug and some at exception level.
    logging.getLogger("mcp").setLevel(logging.CRITICAL if settings.level != "debug" else logging.WARNING)


def _quoted(text: str, *, spaces: bool = False) -> str:
    plain = text.isprintable() and '"' not in text and (spaces or " " not in text)
    return text if plain and text else json.dumps(text)
