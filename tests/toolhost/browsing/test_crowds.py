"""Tags with very many attributes, in whatever they hide: they are noticed and cut, in time that grows with the page."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selectolax.lexbor import LexborHTMLParser

from toolhost.browsing import crowds
from toolhost.browsing.crowds import MAX_ATTRIBUTES, crowded, without_crowds
from toolhost.browsing.html_isolated import is_risky

ANY = 10**9
OPENS = '<!-- <x y=" -->'  # a quotation mark in a comment, which seems to open a value


def names(number: int) -> str:
    return " ".join(f"a{one}" for one in range(number))


def alternating(number: int) -> str:
    """Read one way these are few attributes with long values, read the other way the values are the attributes."""
    parts = [" ".join(f"a{one}" for one in range(at, at + 400)) for at in range(0, number, 400)]
    return f"{OPENS}<p " + ' b=" x="'.join(parts) + ' z=">">hello</p>'


CROWDS: dict[str, Callable[[int], str]] = {
    "plain": lambda n: f"<p {names(n)}>hello</p>",
    "behind a comment's quotation mark": lambda n: f'{OPENS}<p {names(n)} z=">">hello</p>',
    "behind one again and again": alternating,
    "in a tag that closes": lambda n: f"</p {names(n)}>hello",
    "in a tag that closes, hidden": lambda n: f'{OPENS}</p {names(n)} z=">">hello',
    "with slashes between": lambda n: f"{OPENS}<p/" + "/".join(f"a{one}" for one in range(n)) + ' z=">">hello</p>',
    "behind a name with tags in it": lambda n: f"<a<b<c {names(n)}>hello</a>",
    "added to the page's own element": lambda n: "".join(f"<html a{one}>" for one in range(n)) + "hello",
    "added to it, hidden": lambda n: OPENS + "".join(f"<BODY a{one}>" for one in range(n)) + '">hello',
}
OTHERS: dict[str, Callable[[int], str]] = {
    "names": lambda n: "<a" * n + " ",
    "values": lambda n: "<a x=\"<b y='" * n,
    "a value without quotation marks": lambda n: "<a/b=" * n + " ",
    "an open value": lambda n: "<a b='" + "<a x y " * n,
    "ordinary": lambda n: '<div class="x"><a href="/y" title="<b> z">w</a></div>' * n,
}


@pytest.mark.parametrize("name", CROWDS)
def test_they_are_noticed_and_cut_and_what_follows_is_read(name: str) -> None:
    source = CROWDS[name](30_000)
    assert is_risky(source)
    cut = without_crowds(source)
    tree = LexborHTMLParser(cut)
    most = MAX_ATTRIBUTES * (2 if "added" in name else 1)
    assert max(len(node.attributes) for node in tree.css("*")) <= most
    assert tree.body is not None
    assert tree.body.text(deep=True).endswith("hello")
    assert not crowded(cut, ANY)


@pytest.mark.parametrize("name", CROWDS | OTHERS)
def test_time_grows_with_the_page(name: str) -> None:
    """By cpu, four times as much: to grow with its square would be sixteen times."""

    def cpu_s(source: str) -> float:
        began = time.process_time()
        without_crowds(source)
        crowded(source, ANY)
        LexborHTMLParser(without_crowds(source))
        return time.process_time() - began

    small, large = ((CROWDS | OTHERS)[name](number) for number in (20_000, 80_000))
    assert min(cpu_s(large) for _ in range(3)) < 10 * min(cpu_s(small) for _ in range(3)) + 0.01


def test_ordinary_pages_have_none() -> None:
    page = OTHERS["ordinary"](4000) + f'<!-- it\'s --><p title="{"long <b> " * 3000}">x</p>'
    assert not crowded(page, ANY)
    assert without_crowds(page) == page


def test_what_takes_too_long_to_look_through_counts_as_one() -> None:
    page = f'<p title="<b>">{OPENS}<i a b c>"' * 100
    assert not crowded(page, ANY)
    assert crowded(page, 50)


_TAGS = ["<p ", "</p ", "<p/", ">", "<", "<!--", "-->", "<script>", "</script>", "<title>", "</title>", "<svg>"]
_QUOTES = ["<textarea>", "</textarea>", "<![CDATA[", "]]>", '"', "'", "=", '="', "='", "/", "\n"]
_NAMES = [" a", " b", " c", " d", " e", " f", " g", " h b i", " j c k d"]
_PIECES = st.one_of(st.sampled_from(_TAGS), st.sampled_from(_QUOTES), *[st.sampled_from(_NAMES)] * 3)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(_PIECES, min_size=10, max_size=60))
def test_no_tag_has_more_whatever_is_around_it(pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crowds, "MAX_ATTRIBUTES", 3)
        cut = "".join(pieces)
        for at in reversed(list(crowds._crowds(cut, None))):
            cut = f"{cut[:at]}>{cut[at:]}"
    assert all(len(node.attributes) <= 3 for node in LexborHTMLParser(cut).css("*"))
