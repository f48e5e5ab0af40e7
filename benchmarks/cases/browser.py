"""What the browser needs for a page: 14 real ones of several scripts, by cpu time, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from selectolax.lexbor import LexborHTMLParser

from benchmarks.bench import Bench
from benchmarks.samples import Samples
from benchmarks.tables import Table
from tests.support.real_pages import CannotGet, real_pages
from toolhost.browsing.documents import Bytes, RenderLimits, to_page_now
from toolhost.browsing.find import find_in_page

PAGES = Path(".cache") / "real-pages"
PARSE, OPEN, WRAP, FIND = "selectolax parses it", "open: bytes to page", "open: its display lines", "find: a word in it"
NOTE = (
    "Cpu time of one page: the least of several turns, a sample for each of 14 pages (Debian documentation in nine "
    "languages, docutils). Fetching is left out."
)


async def run(bench: Bench) -> list[Table]:
    rows: dict[str, Samples] = {name: Samples() for name in (PARSE, OPEN, WRAP, FIND)}
    PAGES.mkdir(parents=True, exist_ok=True)
    try:
        pages = real_pages(PAGES)
    except CannotGet as error:
        return [Table("browser", "A page in the browser", "s", PARSE, {}, NOTE, dict.fromkeys(rows, str(error)))]
    for source in pages.values():
        for name, took in _least(source, bench.pick(5, 20)).items():
            rows[name].values.append(took)
    return [Table("browser", "A page in the browser", "s", PARSE, rows, NOTE)]


def _least(source: str, turns: int) -> dict[str, float]:
    document = Bytes("https://docs.example/dir/page.html", "text/html", "utf-8", source.encode())
    found: dict[str, float] = {}
    for _ in range(turns):
        page = to_page_now(document, RenderLimits())
        operations: dict[str, Callable[[], object]] = {
            PARSE: lambda: LexborHTMLParser(source),
            OPEN: lambda: to_page_now(document, RenderLimits()),
            WRAP: lambda page=page: page.lines,  # type: ignore[misc]  # made once for a page: a new one each turn
            FIND: lambda page=page: find_in_page(page, "debian", 0),  # type: ignore[misc]
        }
        for name, operation in operations.items():
            began = time.process_time()
            operation()
            found[name] = min(time.process_time() - began, found.get(name, float("inf")))
    return found
