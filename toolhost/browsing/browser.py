"""The browser's three operations for one session, argument coercion to result text.

Above it: the browser namespace, which calls `search`, `open` and `find` with whatever the model sent and returns the
text, or that of the BrowserError. Below it: `state`, `loader`, `find`, `render` and the search chain.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from toolhost.browsing.arguments import as_flag, as_integer, as_text, integer_or_none, shown
from toolhost.browsing.documents import SOURCE_PREFIX
from toolhost.browsing.errors import BrowserError, FetchError
from toolhost.browsing.find import find_in_page, fold
from toolhost.browsing.links import split_fragment
from toolhost.browsing.loader import PageLoader
from toolhost.browsing.page import Page, one_line
from toolhost.browsing.render import check_location, show
from toolhost.browsing.results import results_page
from toolhost.browsing.state import BrowserState
from toolhost.browsing.tokens import TokenCounter
from toolhost.search.base import Filters, SearchError
from toolhost.search.chain import SearchChain

MAX_TOPN = 20
DEADLINE = 60.0
MAX_QUERY = 2000
MAX_PATTERN = 1000
MAX_REASON = 500
# A passage is shown with a little of what comes before it.
_LINES_BEFORE = 4
# Characters of a page beyond which its lines are made off the event loop.
_LARGE = 200_000
_PARAMETERS = {
    "search": frozenset({"query", "topn", "top_n", "source"}),
    "open": frozenset({"id", "cursor", "loc", "num_lines", "view_source", "source", "url"}),
    "find": frozenset({"pattern", "cursor"}),
}
_BARE_HOST = re.compile(r"[\w-]+(\.[\w-]+)*\.[^\W\d_]{2,}(:\d+)?([/?#].*)?", re.DOTALL)


class Browser:
    """One session's browser. Calls of one session must come one after the other.

    Args:
        state: The stack; the only thing that changes.
        count: Token counter of the viewport.
        filters: Domains permitted for this session or request.
        only_seen: Open only URLs that are on a page or a result of this session.
        deadline: Seconds a page may take in all: fetching, retries, turning it into text.
    """

    def __init__(
        self,
        state: BrowserState,
        loader: PageLoader,
        chain: SearchChain,
        count: TokenCounter,
        *,
        filters: Filters | None = None,
        only_seen: bool = False,
        deadline: float = DEADLINE,
    ) -> None:
        self._state = state
        self._loader = loader
        self._chain = chain
        self._count = count
        self._filters = filters or Filters()
        self._only_seen = only_seen
        self._deadline = deadline

    async def search(
        self, query: object = None, topn: object = None, source: object = None, top_n: object = None
    ) -> str:
        """Search and show the results as a page.

        Args:
            topn: How many results, 10 by default, 1 to 20; more or less is brought into that range.
            top_n: Alias of `topn`, which models also write.
            source: Name of a configured provider to ask alone; anything else is ignored.

        Raises:
            BrowserError: with the result text.
        """
        text = as_text(query, "query")[:MAX_QUERY]
        number = min(max(as_integer(topn if topn is not None else top_n, "topn", 10), 1), MAX_TOPN)
        chosen = source if isinstance(source, str) else None
        try:
            outcome = await self._chain.search(text.strip(), number, self._filters, chosen)
        except SearchError as error:
            reason = one_line(str(error), MAX_REASON)
            raise BrowserError(f"Error during search for `{shown(text)}`: {reason}") from error
        return await self._show(results_page(text, outcome), -1, -1)

    async def open(
        self,
        id: object = -1,
        cursor: object = -1,
        loc: object = -1,
        num_lines: object = -1,
        view_source: object = False,
        source: object = None,
        url: object = None,
    ) -> str:
        """Open a URL, a link of a page, or a page again at another place.

        Args:
            id: A URL; the number of a link of the cursor's page; -1 for that page itself.
            url: Alias of a URL given as `id`.

        Raises:
            BrowserError: with the result text.
        """
        at = as_integer(cursor, "cursor", -1)
        first = as_integer(loc, "loc", -1)
        count = as_integer(num_lines, "num_lines", -1)
        as_source = as_flag(view_source)
        target = id if id not in (None, "") and integer_or_none(id) != -1 else url
        if isinstance(target, str) and integer_or_none(target) is None and target.strip().lower() != "null":
            page, line = await self._open_url(target.strip(), as_source)
        else:
            number = as_integer(target, "id", -1)
            move = self._open_link if number >= 0 else self._again
            page, line = await move(number, at, as_source)
        return await self._show(page, first if first >= 0 else line, count)

    async def find(self, pattern: object = None, cursor: object = -1) -> str:
        """Find text in a page and show the places as a page.

        Raises:
            BrowserError: with the result text.
        """
        at = as_integer(cursor, "cursor", -1)
        text = as_text(pattern, "pattern")[:MAX_PATTERN]
        if not fold(text).strip():
            raise BrowserError("Invalid `pattern` parameter: it has nothing that can be found.")
        page = self._state.page(at)
        found = await asyncio.to_thread(find_in_page, page, text, self._state.number(at))
        return await self._show(found, -1, -1)

    async def call(self, tool: str, arguments: Mapping[str, object]) -> str:
        """Call `search`, `open` or `find` by name; unknown arguments are ignored.

        Raises:
            BrowserError: with the result text; also for an unknown tool.
        """
        operations: dict[str, Callable[..., Awaitable[str]]] = {
            "search": self.search,
            "open": self.open,
            "find": self.find,
        }
        if tool not in operations:
            raise BrowserError(f"There is no tool `{shown(tool)}`. There are: search, open, find.")
        # A name such as `self` must not reach the call either.
        known = {name: value for name, value in arguments.items() if name in _PARAMETERS[tool]}
        return await operations[tool](**known)

    async def _show(self, page: Page, loc: int, num_lines: int) -> str:
        """Push a page and return its text; nothing is pushed if it cannot be shown."""
        if len(page.text) > _LARGE:
            await asyncio.to_thread(getattr, page, "lines")
        loc = max(loc, 0)
        check_location(page, loc)
        return show(page, self._state.push(page), loc, num_lines, self._count)

    async def _again(self, number: int, cursor: int, as_source: bool) -> tuple[Page, int]:
        """The cursor's page once more."""
        entry = self._state.entry(cursor)
        if number != -1:
            raise BrowserError(_invalid_link(number, entry.page))
        if not as_source:
            return self._state.page(cursor), -1
        url = entry.cited_url
        if not url:
            raise BrowserError("This page has no source: it is a list of search results.")
        return await self._load(url.removeprefix(SOURCE_PREFIX), True), -1

    async def _open_link(self, number: int, cursor: int, as_source: bool) -> tuple[Page, int]:
        """Link `number` of the cursor's page."""
        page = self._state.page(cursor)
        if number >= len(page.links):
            raise BrowserError(_invalid_link(number, page))
        line = page.link_lines.get(number, -1)
        if line > _LINES_BEFORE:
            line -= _LINES_BEFORE
        if page.origin is not None and not as_source:
            origin = self._state.entry(page.origin).page
            if origin is not None:
                return origin, line
        if as_source:
            return await self._load(split_fragment(page.links[number])[0], True), -1
        address, fragment = split_fragment(page.links[number])
        kept = self._state.latest(address)
        if kept is not None and not self._filters.permits(urlsplit(address).hostname or ""):
            kept = None  # it was opened when more was permitted; loading it says why it is not any more
        found = kept if kept is not None else await self._load(address, False)
        anchor = found.anchor_line(fragment) if fragment else None
        return found, line if anchor is None else min(anchor, len(found.lines) - 1)

    async def _open_url(self, text: str, as_source: bool) -> tuple[Page, int]:
        """A URL as the model wrote it."""
        if text.lower().startswith(SOURCE_PREFIX):
            text, as_source = text[len(SOURCE_PREFIX) :], True
        if _BARE_HOST.fullmatch(text):
            text = "https://" + text
        address, fragment = split_fragment(text)
        if self._only_seen and not self._state.was_seen(address):
            raise BrowserError(
                f"Error fetching URL `{one_line(text, 1024)}`: only URLs from this session's search results and pages "
                "may be opened. Search first, or open a link by its id."
            )
        page = await self._load(address, as_source)
        anchor = page.anchor_line(fragment) if fragment and not as_source else None
        return page, -1 if anchor is None else anchor

    async def _load(self, url: str, as_source: bool) -> Page:
        try:
            async with asyncio.timeout(self._deadline):
                return await self._loader.load(url, self._filters, source=as_source)
        except TimeoutError:
            reason = f"no page within {self._deadline:g} seconds"
        except FetchError as error:
            reason = str(error)
        raise BrowserError(f"Error fetching URL `{one_line(url, 1024)}`: {one_line(reason, MAX_REASON)}")


def _invalid_link(number: int, page: Page | None) -> str:
    if page is None or not page.links:
        return f"Invalid link id `{number}`. There are no links on this page."
    return f"Invalid link id `{number}`. Valid ids on this page: 0-{len(page.links) - 1}."
