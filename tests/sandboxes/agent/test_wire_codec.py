"""The codec reads and writes what the `json` package does, also in a process that never imports it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.agent import wire

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), _json))
def test_a_frame_is_one_ascii_line_that_json_reads_back(fields: dict[str, object]) -> None:
    line = wire.encode({**fields, "t": "ping"})
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert wire.decode(line, wire.REQUESTS) == json.loads(line)


BAD = [
    b"",
    b" ",
    b"{",
    b"}",
    b'{"t":"pi',
    b'{"t":"ping"} x',
    b'{"t":"ping","x":NaN}',
    b'{"t":"ping","x":Infinity}',
    b'{"t":"ping","x":"\x01"}',
    b'{"t":"ping",}',
    b'{"t":ping}',
    b"[" * 100_000,
    b'{"t":' + b"9" * 5000 + b"}",
    b'"ping"',
    b'{"t":"hullo"}',
    b'{"t":["ping"]}',
    b'{"t":"ping","x":"\xff"}',
]


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_what_is_no_frame_is_a_frame_error(line: bytes) -> None:
    with pytest.raises(wire.FrameError):
        wire.decode(line, wire.REQUESTS)


def test_bad_lines_are_frame_errors_too_where_json_is_not_imported() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(wire.__file__).parent)!r})
import wire
for line in {BAD!r}:
    try:
        wire.decode(line, wire.REQUESTS)
    except wire.FrameError:
        continue
    raise SystemExit(repr(line[:50]))
raise SystemExit("json" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    try:
        frame = wire.decode(data, wire.REQUESTS)
    except wire.FrameError:
        return
    assert frame["t"] in wire.REQUESTS


def test_a_number_that_json_does_not_have_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        wire.encode({"t": "ping", "x": float("nan")})
