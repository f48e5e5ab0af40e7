"""Find in a page: case-insensitive, compatibility forms alike, across wrapped lines; answers in display lines."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from itertools import pairwise
from urllib.parse import quote

from toolhost.browsing.links import mark_spans
from toolhost.browsing.page import Page, one_line, wrap_line

MAX_HITS = 50
LINES_PER_HIT = 4
_SPACES = re.compile(r"\s+")
# Characters that are not seen and must not keep a phrase from being found.
_INVISIBLE = {0xAD: None, 0x200B: None, 0x200C: None, 0x200D: None, 0x2060: None, 0xFEFF: None}


def fold(text: str) -> str:
    """`text` as it is compared: NFKC, case folded, white space runs as one space."""
    if text.isascii():
        return _SPACES.sub(" ", text.lower())
    folded = unicodedata.normalize("NFKC", text.translate(_INVISIBLE)).casefold()
    return _SPACES.sub(" ", unicodedata.normalize("NFKC", folded))


def find_in_page(page: Page, pattern: str, cursor: int) -> Page:
    """The find page for `pattern` in `page`, which is at `cursor`. `pattern` must not be blank."""
    shown = one_line(pattern, 200)
    index = _Index(page)
    hits = index.hits(fold(pattern).strip())
    chunks = [
        "\n".join([f"# 【{number}†match at L{line}】", *index.shown[line : line + LINES_PER_HIT]])
        for number, line in enumerate(hits)
    ]
    return Page(
        url=f"{page.url}/find?pattern={quote(pattern[:200])}" if page.url else "",
        title=f"Find results for text: `{shown}` in `{page.title}`",
        text="\n\n".join(chunks) if chunks else f"No `find` results for pattern: `{shown}`",
        links=tuple(page.url for _ in hits),
        link_lines=dict(enumerate(hits)),
        kind="find",
        origin=cursor,
    )


class _Index:
    """The folded text of a page, and which display line each place in it belongs to."""

    def __init__(self, page: Page) -> None:
        self.shown: list[str] = []
        self._parts: list[str] = []
        self._offsets: list[int] = []
        self._lines: list[int] = []
        self._length = 0
        self._ends_blank = True
        for text_line in page.text.split("\n"):
            self._add_text_line(text_line)
        self._text = "".join(self._parts)

    def _add_text_line(self, text_line: str) -> None:
        pieces = _without_marks(text_line)
        first = len(self.shown)
        self.shown.extend(pieces)
        if not text_line.strip():
            # An empty line ends a paragraph: no phrase goes across it.
            self._append("\n", first)
            return
        for number, piece in enumerate(_joined_marks(pieces)):
            self._append(fold(piece), first + number)
        self._append(" ", first + len(pieces) - 1)

    def _append(self, text: str, line: int) -> None:
        if self._ends_blank and text[:1] == " ":
            text = text[1:]
        if not text:
            return
        self._parts.append(text)
        self._offsets.append(self._length)
        self._lines.append(line)
        self._length += len(text)
        self._ends_blank = text[-1] in " \n"

    def hits(self, pattern: str) -> list[int]:
        """Display lines where a match begins, each past the lines shown for the one before."""
        found: list[int] = []
        position = self._text.find(pattern) if pattern else -1
        while position >= 0 and len(found) < MAX_HITS:
            line = self._lines[bisect_right(self._offsets, position) - 1]
            found.append(line)
            following = bisect_left(self._lines, line + LINES_PER_HIT)
            if following == len(self._lines):
                break
            position = self._text.find(pattern, self._offsets[following])
        return found


def _without_marks(text_line: str) -> list[str]:
    """Display lines of a text line with link marks taken out; where lines break does not change by that."""
    pieces = wrap_line(text_line)
    if "【" not in text_line:
        return pieces
    expanded = "".join(pieces)
    keep: list[tuple[int, int]] = []
    position = 0
    for start, end in mark_spans(expanded):
        keep.append((position, start))
        position = end
    keep.append((position, len(expanded)))
    bounds = [0]
    for piece in pieces:
        bounds.append(bounds[-1] + len(piece))
    result = []
    number = 0
    for start, end in pairwise(bounds):
        parts = []
        while number < len(keep) and keep[number][0] < end:
            parts.append(expanded[max(keep[number][0], start) : min(keep[number][1], end)])
            if keep[number][1] > end:
                break
            number += 1
        result.append("".join(parts))
    return result


def _joined_marks(pieces: list[str]) -> list[str]:
    """Pieces with combining marks moved back to the character they belong to, should wrapping have parted them."""
    if len(pieces) < 2 or all(piece.isascii() for piece in pieces):
        return pieces
    pieces = list(pieces)
    for index in range(1, len(pieces)):
        piece = pieces[index]
        length = 0
        while length < len(piece) and unicodedata.combining(piece[length]):
            length += 1
        if length:
            pieces[index - 1] += piece[:length]
            pieces[index] = piece[length:]
    return pieces
