"""Real pages of several scripts, fetched at test time from Debian packages and PyPI sources: nothing of them is lost.

What a page holds is read independently, with the standard library's HTMLParser.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser

from selectolax.lexbor import LexborHTMLParser

from toolhost.browsing.html import RenderedHtml, render_html
from toolhost.browsing.html_isolated import is_risky
from toolhost.browsing.links import strip_marks

JOINED = frozenset(
    {
        "a",
        "abbr",
        "acronym",
        "b",
        "bdi",
        "bdo",
        "big",
        "cite",
        "code",
        "dfn",
        "em",
        "font",
        "i",
        "kbd",
        "mark",
        "q",
        "s",
    }
    | {"samp", "small", "span", "strike", "strong", "tt", "u", "var", "ins", "del", "time", "wbr", "label"}
)
UNSEEN = frozenset({"script", "style", "head", "template", "svg", "math", "object", "video", "audio", "iframe"})


class Reader(HTMLParser):
    """Words, code blocks and table rows of a page, read without the code under test."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.codes: list[str] = []
        self.rows: list[list[str]] = []
        self._images = 0
        self._unseen = 0
        self._pre: list[str] | None = None
        self._row: list[list[str]] | None = None
        self._cell = False

    def _put(self, text: str) -> None:
        if self._unseen:
            return
        self.text.append(text)
        if self._pre is not None:
            self._pre.append(text)
        if self._row and self._cell:
            self._row[-1].append(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in UNSEEN:
            self._unseen += 1
        elif tag == "img" and not self._unseen:
            values = dict(attrs)
            alt = " ".join((values.get("alt") or values.get("title") or "").split())
            mark = f"[Image {self._images}: {alt}]" if alt else f"[Image {self._images}]"
            self._images += 1
            self._put(mark if self._pre is not None else f" {alt} ")
        elif tag in ("sup", "sub") and self._pre is not None:
            self._put("^{" if tag == "sup" else "_{")
        elif tag == "pre":
            self._pre = []
            self._row = None  # such a row is laid out as blocks
        elif tag in ("table", "h1", "h2", "h3", "h4", "h5", "h6"):
            self._row = None
        elif tag == "tr":
            self._row, self._cell = [], False
        elif tag in ("td", "th") and self._row is not None:
            self._row.append([])
            self._cell = True
        elif tag == "br" and self._pre is not None:
            self._put("\n")
        if tag not in JOINED and self._pre is None:
            self._put(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in UNSEEN:
            self._unseen -= 1
        elif tag == "pre" and self._pre is not None:
            self.codes.append("".join(self._pre))
            self._pre = None
        elif tag in ("sup", "sub") and self._pre is not None:
            self._put("}")
        elif tag in ("td", "th"):
            self._cell = False
        elif tag == "tr" and self._row is not None:
            self.rows.append(["".join(cell) for cell in self._row])
            self._row = None
        if tag not in JOINED and self._pre is None:
            self._put(" ")

    def handle_data(self, data: str) -> None:
        self._put(data)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def read(source: str) -> Reader:
    reader = Reader()
    reader.feed(source)
    reader.close()
    return reader


def rendered(source: str) -> tuple[RenderedHtml, str]:
    page = render_html(source, "https://docs.example/dir/page.html")
    return page, strip_marks(page.body)


def without_marks(text: str) -> str:
    """Without what a rendering adds inside a line: image numbers and the marks of inline code."""
    return re.sub(r"\[Image \d+(?:: ([^\]]*))?\]", r" \1 ", text).replace("`", "")


def test_word_recall(pages: dict[str, str]) -> None:
    recalls = {}
    for name, source in pages.items():
        expected = Counter(words("".join(read(source).text)))
        shown = Counter(words(rendered(source)[1]))
        assert expected.total() > 200, name
        recalls[name] = (expected & shown).total() / expected.total()
    assert min(recalls.values()) >= 0.98, recalls


def test_no_word_is_made_up(pages: dict[str, str]) -> None:
    for name, source in pages.items():
        expected = Counter(words("".join(read(source).text)))
        shown = Counter(words(without_marks(rendered(source)[1])))
        # Numbers of ordered lists are the only words a rendering adds.
        extra = Counter({word: n for word, n in (shown - expected).items() if not word.isdigit()})
        assert extra.total() <= 0.01 * expected.total(), (name, extra.most_common(10))


def has_code(lines: list[str], code: str) -> bool:
    """Whether the lines of a code block stand in the page one after the other, each behind the same indentation."""
    wanted = code.removeprefix("\n").split("\n")
    while wanted and not wanted[-1].strip():
        wanted.pop()
    if not wanted:
        return True
    first = next(number for number, line in enumerate(wanted) if line.strip())
    for number, line in enumerate(lines):
        if not line.endswith(wanted[first]):
            continue
        prefix = line[: len(line) - len(wanted[first])]
        start = number - first
        if start < 0 or not prefix.endswith("    "):
            continue
        indent = " " * len(prefix)
        shown = lines[start : start + len(wanted)]
        if all(
            (got == prefix + want or got == indent + want) if want.strip() else not got.strip()
            for got, want in zip(shown, wanted, strict=False)
        ):
            return len(shown) == len(wanted)
    return False


def test_code_blocks_are_exact(pages: dict[str, str]) -> None:
    count = 0
    for name, source in pages.items():
        lines = rendered(source)[1].split("\n")
        for code in read(source).codes:
            count += 1
            assert has_code(lines, code), (name, code)
    assert count > 60


def test_table_rows_are_kept(pages: dict[str, str]) -> None:
    count = 0
    for name, source in pages.items():
        shown = Counter(
            (tuple(words(line)), line.count(" | ") + 1)
            for line in without_marks(rendered(source)[1]).split("\n")
            if line.lstrip(" >").startswith("| ") and line.endswith(" |")
        )
        for row in read(source).rows:
            if not any(cell.strip() for cell in row):
                continue
            key = (tuple(words(" ".join(row))), len(row))
            count += 1
            assert shown[key] > 0 or any(found == key[0] for found, _ in shown), (name, row)
    assert count > 100


def cpu_s(work: Callable[[], object]) -> float:
    """The least cpu time of a few runs, in seconds."""
    runs = []
    for _ in range(5):
        start = time.process_time()
        work()
        runs.append(time.process_time() - start)
    return min(runs)


def test_a_page_costs_a_small_multiple_of_parsing_it(pages: dict[str, str]) -> None:
    """Near 15 times, which is a few milliseconds (benchmarks/cases/browser.py has the figures); never 60."""
    ratios = {}
    for name, source in pages.items():
        assert not is_risky(source)
        rendering = cpu_s(lambda source=source: render_html(source, "https://docs.example/"))  # type: ignore[misc]
        ratios[name] = rendering / cpu_s(lambda source=source: LexborHTMLParser(source))  # type: ignore[misc]
    assert statistics.median(ratios.values()) < 60, ratios
