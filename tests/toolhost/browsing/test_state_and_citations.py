"""The stack within its caps, stored and restored; citations that resolve even after eviction."""

from __future__ import annotations

import json
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


def stored(state: BrowserState) -> dict[str, bytes]:
    """What a store has of a state that was never saved before."""
    return {name: part for name, part in state.unsaved().items() if part is not None}


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
    parts = stored(state)
    assert sum(len(part) for part in parts.values()) < 2 * len(shown.packed) + 10_000
    again = BrowserState.from_parts(parts)
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
    restored = BrowserState.from_parts(stored(state), max_pages=pages, max_bytes=size)
    assert list(restored.entries()) == list(state.entries())
    assert len(restored) == len(state) and restored.size == state.size
    assert sum(entry.page is not None for _, entry in state.entries()) <= pages
    kept = {id(entry.page): entry.page for _, entry in state.entries() if entry.page is not None}
    assert state.size == sum(shown.size for shown in kept.values())
    assert state.size <= size or sum(entry.page is not None for _, entry in state.entries()) == 1
    for name, _, _ in steps[-1:]:
        assert restored.push(page(name)) == state.push(page(name))
    assert list(restored.entries()) == list(state.entries())


def test_a_call_stores_what_it_added_and_removes_what_it_evicted() -> None:
    state = BrowserState(max_pages=2)
    state.push(page("a"))
    assert state.unsaved().keys() == {"e0", "p0"}
    assert state.unsaved().keys() == {"e0", "p0"}, "until it is stored"
    state.saved()
    assert state.unsaved() == {}
    state.push(state.page(0))
    assert state.unsaved().keys() == {"e1"}, "its page is there"
    state.push(page("b"))
    state.push(page("c"))
    changes = state.unsaved()
    assert changes.keys() == {"e1", "e2", "e3", "p2", "p3", "p0"}
    assert [name for name, part in changes.items() if part is None] == ["p0"]


def test_the_size_of_what_is_stored_does_not_grow_with_the_stack() -> None:
    state = BrowserState()
    sizes = []
    for number in range(150):
        state.push(page(f"n{number}", "x" * 20_000))
        sizes.append(sum(len(part) for part in state.unsaved().values() if part is not None))
        state.saved()
    assert max(sizes) < min(sizes) + 50


@settings(max_examples=60, deadline=None)
@given(operations, st.integers(1, 5), st.integers(100, 6000), st.sets(st.integers(0, 30)))
def test_storing_by_steps_of_which_some_fail_gives_the_same_as_storing_all(
    steps: list[tuple[str, int, bool]], pages: int, size: int, failing: set[int]
) -> None:
    state = BrowserState(max_pages=pages, max_bytes=size)
    kept: dict[str, bytes] = {}

    def store() -> None:
        for name, part in state.unsaved().items():
            if part is None:
                kept.pop(name, None)
            else:
                kept[name] = part
        state.saved()

    for number, (name, length, again) in enumerate(steps):
        state.push(state.page() if again and len(state) else page(name, "z" * length))
        if number not in failing:
            store()
    store()
    restored = BrowserState.from_parts(kept, max_pages=pages, max_bytes=size)
    assert list(restored.entries()) == list(state.entries())
    assert all(restored.was_seen(entry.url) for _, entry in state.entries())
    assert restored.unsaved() == {}


def entry(**changed: object) -> bytes:
    values = {"version": 2, "url": "u", "title": "t", "page": 0, "cited": "u", "seen": [], **changed}
    return zlib.compress(json.dumps(values).encode())


@pytest.mark.parametrize(
    "parts",
    [
        *({"e0": b""}, {"e0": b"x"}, {"e0": zlib.compress(b"{}")}, {"e0": zlib.compress(b"[1]")}),
        *({"e0": zlib.compress(b"\xff")}, {"e0": entry(version=99)}, {"e0": entry()[:-3]}, {"e0": entry(seen=None)}),
        *({"": entry()}, {"ex": entry()}, {"x0": entry()}, {"e0": entry(), "p0": b"x"}, {"e0": entry(seen=[1])}),
    ],
)
def test_parts_that_are_no_state_are_refused(parts: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match=r"browser state"):
        BrowserState.from_parts(parts)


def test_an_entry_whose_page_is_not_there_has_lost_its_text() -> None:
    state = BrowserState.from_parts({"e0": entry()})
    with pytest.raises(BrowserError, match="no longer kept"):
        state.page()
    assert state.push(page("a")) == 1


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
    restored = BrowserState.from_parts(stored(state), max_pages=1)
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
