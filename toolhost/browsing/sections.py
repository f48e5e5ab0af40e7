"""Files for the corpus: read as the browser would show them, and cut into sections by heading."""

from __future__ import annotations

import re
from pathlib import Path

from toolhost.browsing.documents import Bytes, RenderLimits, to_page_now
from toolhost.browsing.errors import FetchError
from toolhost.browsing.html import WEB_SCHEMES
from toolhost.browsing.links import strip_marks
from toolhost.browsing.page import Page, one_line
from toolhost.search.base import Document
from toolhost.search.corpus import SCHEME, Converted, Section, Unreadable

_TYPES = {".html": "text/html", ".htm": "text/html", ".xhtml": "application/xhtml+xml", ".pdf": "application/pdf"}
_HEADING = re.compile(r"#{1,6} +(\S.*)")
_PAGE_MARK = re.compile(r"\[Page \d+\]")
_FENCE = re.compile(r"\s*(```|~~~)")
# A section longer than this is cut at the next empty line, so that a hit's line is near its words.
_LONG = 3000
_FIRST_BODY_LINE = 2


class FileConverter:
    """Turns files into what the corpus keeps.

    Args:
        limits: Bounds of each file.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()

    def __call__(self, path: Path, url: str) -> Converted:
        """Read one file. Raises Unreadable, or OSError."""
        kind = _TYPES.get(path.suffix.lower(), "text/plain")
        document = Bytes(url, kind, None, path.read_bytes(), schemes=WEB_SCHEMES | {SCHEME})
        try:
            page = to_page_now(document, self._limits)
        except FetchError as error:
            raise Unreadable(str(error)) from error
        cut = sections(page)
        title = page.title if kind != "text/plain" else next((s.heading for s in cut if s.heading), page.title)
        return Converted(Document(page.url, title, page.text, page.links, page.anchors), cut)


def sections(page: Page) -> tuple[Section, ...]:
    """The page cut at headings (`#` lines, `[Page n]` marks), each with its first display line."""
    found: list[Section] = []
    lines: list[str] = []
    start, heading, length, fenced = _FIRST_BODY_LINE, "", 0, False

    def close(end: int) -> None:
        nonlocal start, length
        text = strip_marks("\n".join(lines)).strip()
        if text:
            found.append(Section(page.starts[min(start, len(page.starts) - 1)], heading, text))
        lines.clear()
        start, length = end, 0

    for number, line in enumerate(page.text.split("\n")):
        if number < _FIRST_BODY_LINE:
            continue
        if _FENCE.match(line):
            fenced = not fenced
        mark = None if fenced else _HEADING.fullmatch(line)
        if mark or _PAGE_MARK.fullmatch(line):
            close(number)
            heading = one_line(strip_marks(mark.group(1))) if mark else ""
        elif length > _LONG and not line.strip():
            close(number)
        lines.append(line)
        length += len(line)
    close(len(page.starts))
    return tuple(found)
