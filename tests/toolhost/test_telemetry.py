"""Logs: a line an event, whatever stands in it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from toolhost.config import LogSettings
from toolhost.telemetry import configure

FIELDS = {"session": "p/request/a", "note": 'a "quoted"\nline', "nothing": None}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("toolhost", "sandboxes", "mcp")}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def written(settings: LogSettings) -> str:
    stream = io.StringIO()
    configure(settings, stream)
    logging.getLogger("toolhost.calls").info("call", extra={"fields": FIELDS})
    logging.getLogger("toolhost.calls").debug("hidden")
    return stream.getvalue()


def test_off_a_terminal_a_line_is_a_json_object() -> None:
    (line,) = written(LogSettings()).splitlines()
    found = json.loads(line)
    assert found["event"] == "call"
    assert found["session"] == "p/request/a"
    assert found["note"] == FIELDS["note"]


def test_text_stays_on_one_line() -> None:
    (line,) = written(LogSettings(format="text")).splitlines()
    assert "session=p/request/a" in line
    assert '\\"quoted\\"\\nline' in line
    assert "nothing" not in line


def test_an_exception_is_in_the_record() -> None:
    stream = io.StringIO()
    configure(LogSettings(), stream)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("toolhost").exception("failed")
    assert "ValueError: why" in json.loads(stream.getvalue())["exception"]
