"""PDF to text in a process that can be killed, with limits on memory, time, pages and characters."""

from __future__ import annotations

import json
from dataclasses import dataclass

from toolhost.browsing.errors import FetchError
from toolhost.browsing.page import clean
from toolhost.browsing.worker import Worker


@dataclass(frozen=True)
class PdfLimits:
    """Bounds of reading one PDF. When one is met, what was read until then is shown."""

    pages: int = 1000
    seconds: float = 30.0
    memory_bytes: int = 1024 * 1024 * 1024
    characters: int = 8_000_000


@dataclass(frozen=True)
class PdfText:
    """Text by page; `total` is how many pages the document says it has."""

    title: str
    pages: tuple[str, ...]
    total: int

    def body(self) -> str:
        """The pages under their marks, with a note when some are missing."""
        parts = [f"[Page {number}]\n{text}".rstrip() for number, text in enumerate(self.pages, 1)]
        if len(self.pages) < self.total:
            first = len(self.pages) + 1
            missing = f"Page {first} is" if first == self.total else f"Pages {first} to {self.total} are"
            parts.append(f"({missing} not shown: the document is beyond the limits of this browser.)")
        if self.pages and not any(text.strip() for text in self.pages):
            parts.append("(The pages have no text. They may be scanned images.)")
        return "\n\n".join(parts)


async def read_pdf_async(data: bytes, limits: PdfLimits) -> PdfText:
    """`read_pdf` without blocking the event loop; cancelling ends the process."""
    return _parse(await _worker(data, limits).output_async())


def read_pdf(data: bytes, limits: PdfLimits) -> PdfText:
    """Read a PDF.

    Raises:
        FetchError: it is damaged or encrypted, or no page could be read within the limits.
    """
    return _parse(_worker(data, limits).output())


def _worker(data: bytes, limits: PdfLimits) -> Worker:
    numbers = (limits.pages, limits.characters, limits.memory_bytes, int(limits.seconds) + 1)
    return Worker("pdf_worker.py", numbers, data, limits.seconds)


def _parse(output: bytes) -> PdfText:
    lines = output.split(b"\n")
    try:
        head = json.loads(lines[0])
    except ValueError:
        raise FetchError("the PDF could not be read within the limits of this browser") from None
    if "error" in head:
        raise FetchError(f"the PDF is damaged or encrypted: {clean(str(head['error']))[:200]}")
    pages = []
    for line in lines[1:]:
        try:
            pages.append(clean(json.loads(line)["text"]))
        except (ValueError, KeyError):
            break  # the line the process was ended in
    if not pages and head["pages"]:
        raise FetchError("the PDF could not be read within the limits of this browser")
    return PdfText(clean(head.get("title") or ""), tuple(pages), head["pages"])
