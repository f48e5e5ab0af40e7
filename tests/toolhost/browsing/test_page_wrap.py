"""Display lines are exactly the standard library's, in linear time."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolhost.browsing.page import Page, clean, one_line, wrap_line, wrap_text

pieces = st.sampled_from(
    ["a", "bc", "-", "--", " ", "  ", "\t", ".", "é", "人", "word-like", "x" * 90, "-" * 85, "well—no"]
)
lines = st.lists(pieces | st.text(max_size=12).filter(lambda text: "\n" not in text), max_size=60).map("".join)


@settings(max_examples=300, deadline=None)
@given(lines)
def test_wrapping_equals_textwrap(line: str) -> None:
    expected = textwrap.wrap(line, width=80, replace_whitespace=False, drop_whitespace=False) if line else [""]
    assert wrap_line(line) == expected


@settings(max_examples=100, deadline=None)
@given(lines)
def test_nothing_is_lost_by_wrapping(line: str) -> None:
    assert "".join(wrap_line(line)) == line.expandtabs()


def test_a_ten_megabyte_word_is_wrapped() -> None:
    assert len(wrap_line("x" * 10_000_000)) == 125_000


def test_a_ten_megabyte_word_of_hyphens_is_wrapped() -> None:
    assert "".join(wrap_line("-" * 2_000_000)) == "-" * 2_000_000


def test_starts_name_the_first_display_line_of_each_text_line() -> None:
    assert wrap_text("a\n" + "b" * 161 + "\n\nc") == (["a", "b" * 80, "b" * 80, "b", "", "c"], [0, 1, 4, 5])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("【1†x】◼\u200b", "〖1†x〗◾"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\x00b\x1b[31m\ud800c\td", "ab[31mc\td"),
        ("emoji 👩‍💻 ok", "emoji 👩‍💻 ok"),
    ],
)
def test_hostile_characters_are_cleaned(text: str, expected: str) -> None:
    assert clean(text) == expected


def test_a_title_is_one_line_of_bounded_length() -> None:
    assert one_line(" a \n\t b ") == "a b"
    assert one_line("x" * 1000) == "x" * 299 + "…"


def test_a_page_survives_packing() -> None:
    page = Page("u", "t", "text", ("a", "b"), {1: 7}, {"top": 0}, "find", 3)
    assert Page.unpack(page.packed) == page
