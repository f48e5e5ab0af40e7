"""The id of a message that is never held as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolhost.transport.jsonid import KEEP, IdScanner, find_id

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
IDS = st.text(max_size=40) | st.integers(-(10**20), 10**20)


@given(
    before=st.dictionaries(st.text(), VALUES, max_size=3), ident=IDS, ascii_only=st.booleans(), step=st.integers(1, 9)
)
def test_the_id_is_found_wherever_it_stands_and_however_the_body_is_cut(
    before: dict[str, Any], ident: str | int, ascii_only: bool, step: int
) -> None:
    before.pop("id", None)
    body = json.dumps({**before, "id": ident, "params": {"id": "not this"}}, ensure_ascii=ascii_only)
    data = body.encode("utf-8", "surrogatepass")
    scanner = IdScanner()
    for start in range(0, len(data), step):
        scanner.feed(data[start : start + step])
    if len(json.dumps(ident)) <= KEEP:
        assert scanner.end() == ident


@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(data: bytes) -> None:
    assert isinstance(find_id(data), str | int | None)


@pytest.mark.parametrize(
    "body",
    [b"{}", b"[]", b'[{"id":1}]', b'{"params":{"id":1}}', b'{"id":null}', b'{"id":true}', b'{"id":1.5}', b'{"id":[1]}'],
)
def test_there_is_no_id_where_none_is(body: bytes) -> None:
    assert find_id(body) is None


def test_memory_stays_bounded_by_a_huge_value() -> None:
    scanner = IdScanner()
    scanner.feed(b'{"id":"')
    for _ in range(1000):
        scanner.feed(b"x" * 10_000)
    assert len(scanner._token) <= KEEP
    scanner.feed(b'"}')
    assert scanner.end() is None
