"""A page as the browser keeps it: an immutable snapshot of text, links and anchors, and its display lines."""

from __future__ import annotations

import json
import re
import textwrap
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote

WRAP_COLUMNS = 80
MAX_TITLE = 300
PageKind = Literal["page", "search", "find", "source"]

# The splitting rule of the standard library's TextWrapper (a documented, stable class attribute).
_CHUNKS = textwrap.TextWrapper.wordsep_re
_SPECIAL = {"【": "〖", "】": "〗", "◼": "◾", "\u200b": ""}
# C0 controls other than tab and newline, and lone surrogates, cannot be shown or sent as UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f\ud800-\udfff]")
# What `clean` changes. Almost no text has any, and looking for it costs little.
_UNCLEAN = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200b【】◼\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` without what would be read as the browser's own marks: `【】` become `〖〗`, `◼` `◾`, U+200B goes.

    Carriage returns become newlines; other control characters and lone surrogates go.
    """
    if _UNCLEAN.search(text) is None:
        return text
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    for mark, instead in _SPECIAL.items():
        text = text.replace(mark, instead)
    return _UNPRINTABLE.sub("", text)


def one_line(text: str, limit: int = MAX_TITLE) -> str:
    """`text` cleaned, white space collapsed, cut at `limit` characters with an ellipsis."""
    text = " ".join(clean(text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def wrap_line(line: str) -> list[str]:
    """One text line as display lines, exactly as `textwrap.wrap(line, 80, replace_whitespace=False,
    drop_whitespace=False)` gives them, but in linear time for a word of any length.

    The pieces joined give the line with its tabs expanded.
    """
    line = line.expandtabs()
    if len(line) <= WRAP_COLUMNS:
        return [line]
    lines: list[str] = []
    current: list[str] = []
    used = 0
    for chunk in _CHUNKS.split(line):
        start, end = 0, len(chunk)
        while start < end:
            if end - start <= WRAP_COLUMNS - used:
                current.append(chunk[start:])
                used += end - start
                break
            if end - start > WRAP_COLUMNS:
                cut = _long_word_cut(chunk, start, WRAP_COLUMNS - used)
                current.append(chunk[start:cut])
                start = cut
            lines.append("".join(current))
            current, used = [], 0
    if current:
        lines.append("".join(current))
    return lines


def _long_word_cut(chunk: str, start: int, room: int) -> int:
    """Where TextWrapper cuts a word too long for any line: after the last hyphen that fits, else at the edge."""
    hyphen = chunk.rfind("-", start, start + room)
    if hyphen > start and any(char != "-" for char in chunk[start:hyphen]):
        return hyphen + 1
    return start + room


def wrap_text(text: str) -> tuple[list[str], list[int]]:
    """Display lines of a page's text, and for each text line the index of its first display line."""
    lines: list[str] = []
    starts: list[int] = []
    for line in text.split("\n"):
        starts.append(len(lines))
        lines.extend(wrap_line(line))
    return lines, starts


@dataclass(frozen=True)
class Page:
    """A snapshot. Everything in it is data, so it can be kept, sent and shown again unchanged.

    Attributes:
        url: Final absolute URL; empty for a search page.
        title: One line.
        text: The whole page text, L0 being an empty line and L1 the URL, except on a find page.
        links: Absolute URL of each link id.
        link_lines: Display line a link should open at, by id (search passages and find hits).
        anchors: Fragment name to text line (not display line).
        kind: What made the page.
        origin: For a find page, the cursor it searched.
    """

    url: str
    title: str
    text: str
    links: tuple[str, ...] = ()
    link_lines: Mapping[int, int] = field(default_factory=dict)
    anchors: Mapping[str, int] = field(default_factory=dict)
    kind: PageKind = "page"
    origin: int | None = None

    @cached_property
    def _wrapped(self) -> tuple[list[str], list[int]]:
        return wrap_text(self.text)

    @property
    def lines(self) -> list[str]:
        """The display lines, numbered from 0."""
        return self._wrapped[0]

    @property
    def starts(self) -> list[int]:
        """For each text line, its first display line."""
        return self._wrapped[1]

    @cached_property
    def size(self) -> int:
        """Bytes this page is counted with against a session's cap."""
        return (
            len(self.text.encode())
            + sum(map(len, self.links))
            + sum(len(name) + 8 for name in self.anchors)
            + 8 * len(self.link_lines)
        )

    def anchor_line(self, fragment: str) -> int | None:
        """Display line of a fragment, or None when the page has no such anchor.

        As it is written first, then decoded: links to `#é` are mostly written `#%C3%A9` (HTML standard).
        """
        text_line = self.anchors.get(fragment, self.anchors.get(unquote(fragment)))
        return None if text_line is None or text_line >= len(self.starts) else self.starts[text_line]

    @cached_property
    def packed(self) -> bytes:
        """The page as bytes. Made once, because a session is stored after every call."""
        values: dict[str, Any] = {
            "url": self.url,
            "title": self.title,
            "text": self.text,
            "links": list(self.links),
            "link_lines": {str(key): line for key, line in self.link_lines.items()},
            "anchors": dict(self.anchors),
            "kind": self.kind,
            "origin": self.origin,
        }
        return zlib.compress(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode(), level=1)

    @classmethod
    def unpack(cls, packed: bytes) -> Page:
        """The page `packed` holds. Raises zlib.error, ValueError, KeyError or TypeError for anything else."""
        data = json.loads(zlib.decompress(packed))
        return cls(
            url=data["url"],
            title=data["title"],
            text=data["text"],
            links=tuple(data["links"]),
            link_lines={int(key): line for key, line in data["link_lines"].items()},
            anchors=dict(data["anchors"]),
            kind=data["kind"],
            origin=data["origin"],
        )


def with_url_line(url: str, body: str) -> str:
    """Page text as the model knows it: an empty line, the URL line, then the body."""
    return f"\nURL: {url}\n{body}"
