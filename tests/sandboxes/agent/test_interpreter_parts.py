"""The engine's pure parts, on any input."""

from __future__ import annotations

import ast
import contextlib
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.agent.cell import Cell, looks_like_magic
from sandboxes.agent.channel import encode
from sandboxes.agent.text import cut, show

frames = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(frames)
def test_encoded_frame_is_one_ascii_line_that_json_reads_back(value: Any) -> None:
    text = encode(value)
    assert text.isascii()
    assert "\n" not in text
    assert json.loads(text) == value


@given(st.text(), st.integers(2, 50))
def test_cut_text_keeps_both_ends_and_counts_what_is_gone(text: str, cap: int) -> None:
    shown = cut(text, cap)
    shown.encode("utf-8")  # must be possible
    if len(shown) > cap:
        head, tail = text[: cap // 2], text[len(text) - (cap - cap // 2) :]
        assert shown == f"{head}\n... [{len(text) - cap:,} characters cut] ...\n{tail}"
    else:
        assert shown == text


@given(st.text(st.characters(categories=["Cs"]), min_size=1, max_size=5))
def test_lone_surrogates_are_shown_as_escapes(text: str) -> None:
    assert cut(text, 100) == "".join(f"\\u{ord(character):x}" for character in text)


@given(st.lists(st.integers()) | st.text() | st.binary() | st.dictionaries(st.integers(), st.text()))
def test_value_that_fits_is_shown_by_its_repr(value: Any) -> None:
    assert show(value, 10_000) == repr(value)


@given(st.text(), st.sampled_from(["", ";", " ;", ";;", " # ;", "\n;"]))
def test_cell_compiles_when_python_does_and_only_a_semicolon_silences_it(text: str, end: str) -> None:
    source = repr(text) + end
    try:
        ast.parse(source)
    except SyntaxError:
        with pytest.raises(SyntaxError):
            Cell(source, "<cell 1>")
        return
    assert (Cell(source, "<cell 1>").expression is None) == (end.strip() == ";")


@pytest.mark.parametrize(
    ("source", "line", "magic"),
    [
        ("%time x", 1, True),
        ("!ls", 1, True),
        ("?x", 1, True),
        ("x??", 1, True),
        ("y = !ls", 1, True),
        ("y = %pwd", 1, True),
        ("a = 1\n  %time x", 2, True),
        ("%%bash\necho it's", 2, True),
        ("x = = 1", 1, False),
        ("'''\n%time x\n'''\nx = = 1", 4, False),
        ("print 'why?'\n", 1, False),
        ("x", None, False),
        ("", 1, False),
        ("x", 99, False),
    ],
)
def test_magic_is_seen_only_where_the_parser_stopped(source: str, line: int | None, magic: bool) -> None:
    assert looks_like_magic(source, line) is magic


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("display(1)", True),
        ("f(display)", True),
        ("def f():\n    display(1)", True),
        ("'display(1)'", False),
        ("x.display(1)", False),
        ("f(display=1)", False),
        ("display = print\ndisplay(1)", False),
        ("def display(): pass\ndisplay()", False),
        ("lambda display: display", False),
        ("from tools import display\ndisplay(1)", False),
        ("import display\ndisplay", False),
        ("from tools import show as display\ndisplay(1)", False),
    ],
)
def test_name_is_used_from_outside_only_where_the_cell_does_not_make_it(source: str, uses: bool) -> None:
    assert Cell(source, "<cell 1>").uses("display") is uses


@pytest.mark.parametrize("source", [" 1", "\t1", "\f 1", "1\n 2"])
def test_what_only_an_expression_may_begin_with_is_no_cell(source: str) -> None:
    """A cell that is one expression is compiled as one; it is not to take what a module would not."""
    with pytest.raises(SyntaxError):
        compile(source, "<cell 1>", "exec")
    with pytest.raises(SyntaxError):
        Cell(source, "<cell 1>")


@pytest.mark.parametrize(
    "source", [r"x = '\d'", r"'\d'", r"import '\d'", "1 is 1", "print('a') is 'b'", "assert (1, 2)"]
)
def test_what_is_to_be_said_of_a_cell_is_said_once(source: str) -> None:
    def said(read: Callable[[], object]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught, contextlib.suppress(SyntaxError):
            warnings.simplefilter("always")
            read()
        return [str(warning.message) for warning in caught]

    assert said(lambda: Cell(source, "<cell 1>")) == said(lambda: compile(source, "<cell 1>", "exec"))
