"""Citations such as `【3†L9-L11】`: what they point at, and a text's citations as links with annotations."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from toolhost.browsing.errors import BrowserError
from toolhost.browsing.links import strip_marks
from toolhost.browsing.state import BrowserState

CITATION = re.compile(r"【(\d{1,9})†L(\d{1,9})(?:-L?(\d{1,9}))?】", re.ASCII)
_UNFINISHED = re.compile(r"【(?:\d{1,9}(?:†(?:L(?:\d{1,9}(?:-(?:L?\d{0,9})?)?)?)?)?)?$", re.ASCII)
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#+\-.!|~])")
_MAX_LINES = 200


@dataclass(frozen=True)
class Citation:
    """What a citation points at.

    Attributes:
        lines: The cited display lines without link marks; empty when `evicted`.
        evicted: The page's text is gone; its URL and title are not.
    """

    cursor: int
    first: int
    last: int
    url: str
    title: str
    lines: tuple[str, ...]
    evicted: bool


@dataclass(frozen=True)
class Annotated:
    """A text with its citations turned into Markdown links.

    Attributes:
        text: The new text.
        annotations: `url_citation` objects as in the Responses API; offsets in code points of `text`, half open.
        unfinished: Offset in `text` where a citation begins that the text's end cuts off, or None.
    """

    text: str
    annotations: list[dict[str, Any]] = field(default_factory=list)
    unfinished: int | None = None


def resolve(state: BrowserState, citation: str) -> Citation:
    """What one citation points at.

    Raises:
        BrowserError: not a citation, or it names no page or no line of this session.
    """
    match = CITATION.fullmatch(citation.strip())
    if match is None:
        raise BrowserError("Not a citation. It looks like 【3†L9】 or 【3†L9-L11】.")
    return _resolve(state, match)


def _resolve(state: BrowserState, match: re.Match[str]) -> Citation:
    cursor, first = int(match.group(1)), int(match.group(2))
    last = int(match.group(3)) if match.group(3) else first
    if last < first:
        raise BrowserError(f"Lines L{first}-L{last} run backwards.")
    entry = state.entry(cursor)
    if entry.page is None:
        return Citation(cursor, first, last, entry.cited_url, entry.title, (), True)
    total = len(entry.page.lines)
    if first >= total:
        raise BrowserError(f"Page {cursor} has no line L{first}; its last line is L{total - 1}.")
    last = min(last, total - 1, first + _MAX_LINES - 1)
    lines = tuple(strip_marks("\n".join(entry.page.lines[first : last + 1])).split("\n"))
    return Citation(cursor, first, last, entry.cited_url, entry.title, lines, False)


def annotate(state: BrowserState, text: str) -> Annotated:
    """Turn every citation of `text` that resolves to a URL into a Markdown link; the others stay as they are."""
    parts: list[str] = []
    annotations: list[dict[str, Any]] = []
    length = position = 0
    for match in CITATION.finditer(text):
        try:
            citation = _resolve(state, match)
        except BrowserError:
            continue
        if not citation.url:
            continue
        before = text[position : match.start()]
        link = f"[{escape_text(citation.title or citation.url)}]({escape_url(citation.url)})"
        parts += [before, link]
        length += len(before)
        annotations.append(
            {
                "type": "url_citation",
                "start_index": length,
                "end_index": length + len(link),
                "url": citation.url,
                "title": citation.title,
            }
        )
        length += len(link)
        position = match.end()
    rest = text[position:]
    tail = _UNFINISHED.search(rest)
    return Annotated("".join([*parts, rest]), annotations, None if tail is None else length + tail.start())


def escape_text(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", text)


def escape_url(url: str) -> str:
    """A URL that ends where the Markdown link does, and breaks out of nothing."""
    table: dict[str, str | int | None] = {
        "(": "%28",
        ")": "%29",
        "<": "%3C",
        ">": "%3E",
        " ": "%20",
        "\\": "%5C",
        '"': "%22",
        "\n": "",
        "\t": "",
    }
    return url.translate(str.maketrans(table))
