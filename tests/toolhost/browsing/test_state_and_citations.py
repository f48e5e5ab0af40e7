"""The stack within its caps, stored and restored; citations that resolve even after eviction."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolhost.browsing.citations import annotate, resolve
from toolhost.browsing.errors import BrowserError
from toolhost.browsing.find import find_in_page
from toolhost.browsing.page import Page, with_url_line
from toolhost.browsing.state import MAX_ENTRIES, BrowserState


def page(name: str, body: str = "one\ntwo\nthree") -> Page:
    url = f"https://{name}.example/"
    return Page(url, name.title(), with_url_line(url, body), (f"{url}next",))


def test_beyond_the_cap_of_pages_the_oldest_text_goes_and_its_name_stays() -> None:
    state = BrowserState(max_pages=3)
    for name in "abcde":
        state.push(page(name))
    assert [entry.page is not None for _, entry in state.entries()] == [False, False, True, True, True]
    with pytest.raises(
        BrowserError, match=r"^The page of cursor `0` is no longer kept\. Open `https://a.example/` again"
    ):
        state.page(0)
    assert state.entry(0).title == "A" and state.page(-1).title == "E"


def test_beyond_the_cap_of_bytes_the_oldest_text_goes() -> None:
    state = BrowserState(max_bytes=2500)
    for name in "abc":
        state.push(page(name, "x" * 1000))
    assert state.entry(0).page is None and state.entry(1).page is not None and state.size <= 2500


def test_the_newest_page_stays_however_large() -> None:
    state = BrowserState(max_bytes=10)
    state.push(page("a", "x" * 1000))
    assert state.page().title == "A"


def test_a_page_shown_again_is_counted_and_stored_once() -> None:
    state, shown = BrowserState(), page("a", "y" * 100_000)
    state.push(shown)
    size = state.size
    for _ in range(50):
        state.push(shown)
    assert state.size == size
    data = state.to_bytes()
    assert len(data) < 2 * len(shown.packed) + 5000
    again = BrowserState.from_bytes(data)
    assert again.size == size and again.page(3) is again.page(50)


def test_entries_are_bounded() -> None:
    state, shown = BrowserState(max_pages=2), page("a")
    for _ in range(MAX_ENTRIES + 10):
        state.push(shown)
    with pytest.raises(BrowserError, match=rf"\[10 - {MAX_ENTRIES + 9}\]"):
        state.entry(3)


operations = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2000), st.booleans()), max_size=30)


@settings(max_examples=60, deadline=None)
@given(operations, st.integers(1, 5), st.integers(100, 6000))
def test_storing_and_restoring_changes_nothing(steps: list[tuple[str, int, bool]], pages: int, size: int) -> None:
    state = BrowserState(max_pages=pages, max_bytes=size)
    for name, length, again in steps:
        if again and len(state):
            state.push(state.page())
        else:
            state.push(page(name, "z" * length))
    restored = BrowserState.from_bytes(state.to_bytes(), max_pages=pages, max_bytes=size)
    assert list(restored.entries()) == list(state.entries())
    assert len(restored) == len(state) and restored.size == state.size
    assert sum(entry.page is not None for _, entry in state.entries()) <= pages
    kept = {id(entry.page): entry.page for _, entry in state.entries() if entry.page is not None}
    assert state.size == sum(shown.size for shown in kept.values())
    assert state.size <= size or sum(entry.page is not None for _, entry in state.entries()) == 1
    for name, _, _ in steps[-1:]:
        assert restored.push(page(name)) == state.push(page(name))
    assert list(restored.entries()) == list(state.entries())


def head(content: bytes) -> bytes:
    packed = zlib.compress(content)
    return len(packed).to_bytes(8, "big") + packed


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"x", b"\0" * 8, b"\xff" * 20, head(b"{}"), head(b'{"version": 99}'), head(b"[1]"), head(b"\xff")),
        *(BrowserState().to_bytes()[:-3], BrowserState().to_bytes() + b"x"),
    ],
)
def test_bytes_that_are_no_state_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"browser state"):
        BrowserState.from_bytes(data)


def test_a_citation_resolves_to_url_title_and_lines() -> None:
    state = BrowserState()
    state.push(page("a", "alpha\nsee 【0†next】 now\ngamma"))
    found = resolve(state, "【0†L3-L4】")
    assert (found.url, found.title, found.lines, found.evicted) == (
        "https://a.example/",
        "A",
        ("see next now", "gamma"),
        False,
    )
    assert resolve(state, "【0†L2】").lines == ("alpha",)
    assert resolve(state, "【0†L3-L999】").last == 4


def test_a_citation_of_an_evicted_page_keeps_url_and_title() -> None:
    state = BrowserState(max_pages=1)
    state.push(page("a"))
    state.push(page("b"))
    restored = BrowserState.from_bytes(state.to_bytes(), max_pages=1)
    for each in (state, restored):
        found = resolve(each, "【0†L9-L11】")
        assert (found.url, found.title, found.lines, found.evicted) == ("https://a.example/", "A", (), True)


def test_a_citation_of_a_find_page_names_the_page_searched() -> None:
    state = BrowserState()
    state.push(page("a"))
    state.push(find_in_page(state.page(0), "two", 0))
    state.push(find_in_page(state.page(1), "two", 1))
    assert resolve(state, "【1†L1】").url == "https://a.example/"
    assert resolve(state, "【2†L1】").url == "https://a.example/"
    assert resolve(state, "【1†L1】").lines == ("two",)


@pytest.mark.parametrize(
    ("citation", "reason"),
    [
        ("【5†L1】", "Cursor `5` is out of range"),
        ("【0†L99】", "has no line L99; its last line is L4"),
        ("【0†L3-L1】", "run backwards"),
        ("[0]", "Not a citation"),
        ("【0†L1】 and more", "Not a citation"),
        ("【" + "9" * 5000 + "†L1】", "Not a citation"),
    ],
)
def test_a_citation_of_nothing_says_why(citation: str, reason: str) -> None:
    state = BrowserState()
    state.push(page("a"))
    with pytest.raises(BrowserError, match=reason):
        resolve(state, citation)


def test_citations_become_links_with_offsets_in_code_points() -> None:
    state = BrowserState()
    state.push(page("a"))
    state.push(Page("https://b.example/x_(y)?q=<z>", "[B] *star* _u_", with_url_line("u", "t")))
    result = annotate(state, "👩‍💻 one【0†L2】, two 【1†L2-L2】【9†L1】.")
    link_a = "[A](https://a.example/)"
    link_b = r"[\[B\] \*star\* \_u\_](https://b.example/x_%28y%29?q=%3Cz%3E)"
    assert result.text == f"👩‍💻 one{link_a}, two {link_b}【9†L1】."
    assert [result.text[note["start_index"] : note["end_index"]] for note in result.annotations] == [link_a, link_b]
    assert result.annotations[1] == {
        "type": "url_citation",
        "start_index": len(f"👩‍💻 one{link_a}, two "),
        "end_index": len(f"👩‍💻 one{link_a}, two {link_b}"),
        "url": "https://b.example/x_(y)?q=<z>",
        "title": "[B] *star* _u_",
    }
    assert result.unfinished is None


@pytest.mark.parametrize("cut", range(1, len("【0†L12-L14】")))
def test_a_citation_cut_off_by_the_end_is_flagged(cut: int) -> None:
    state = BrowserState()
    state.push(page("a", "line\n" * 20))
    result = annotate(state, "see 【0†L2】 and " + "【0†L12-L14】"[:cut])
    assert result.unfinished == result.text.rindex("【")
    assert annotate(state, "done 【0†L2】").unfinished is None
    assert annotate(state, "【0†x").unfinished is None


def test_a_search_page_has_no_url_to_cite() -> None:
    state = BrowserState()
    state.push(Page("", "q", with_url_line("", "# Search Results"), kind="search"))
    assert annotate(state, "x【0†L2】").text == "x【0†L2】"
