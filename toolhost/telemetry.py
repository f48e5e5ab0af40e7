"""Structured logs: one line an event, its facts as fields. Never code, output or secrets at info level.

Above: everything that logs (through `logging`). Below: `config`.
A record's facts are in `extra={"fields": {...}}`: session, namespace, attempt, epoch and so on.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from toolhost.config import LogSettings


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


def configure(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Sends the logs of this process to `stream` (stderr), replacing earlier handlers. Called once by commands."""
    target = sys.stderr if stream is None else stream
    text = settings.format == "text" or (settings.format == "auto" and target.isatty())
    handler = logging.StreamHandler(target)
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
