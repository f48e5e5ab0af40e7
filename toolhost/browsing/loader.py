"""From a URL to a page, wherever it comes from: the web, or a search provider that has the page itself.

Above it: `browser.Browser`. Below it: `fetch`, `documents` and the search chain.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from toolhost.browsing.documents import Bytes, RenderLimits, to_page
from toolhost.browsing.errors import FetchError
from toolhost.browsing.fetch import Fetcher
from toolhost.browsing.page import Page
from toolhost.search.base import Filters, SearchError
from toolhost.search.chain import SearchChain

CORPUS_SCHEME = "corpus:"


class PageLoader:
    """Loads pages. One for the whole host.

    Args:
        fetcher: For http and https; None when the host is offline.
        chain: Asked for addresses of its own (`corpus://…`).
    """

    def __init__(self, fetcher: Fetcher | None, chain: SearchChain, limits: RenderLimits | None = None) -> None:
        self._fetcher = fetcher
        self._chain = chain
        self._limits = limits or RenderLimits()

    async def load(self, url: str, filters: Filters, *, source: bool = False) -> Page:
        """The page at `url`, without its fragment.

        Raises:
            FetchError: why there is none.
        """
        if url.lower().startswith(CORPUS_SCHEME):
            return await self._from_corpus(url, filters)
        if self._fetcher is None:
            raise FetchError("this browser is offline; only search results of the corpus can be opened")
        answer = await self._fetcher.fetch(url, filters)
        document = Bytes(answer.url, answer.content_type, answer.charset, answer.body, answer.truncated)
        return await to_page(document, self._limits, source=source)

    async def _from_corpus(self, url: str, filters: Filters) -> Page:
        if not filters.permits(urlsplit(url).netloc):
            raise FetchError("this collection is not permitted here: a domain list leaves it out")
        try:
            document = await self._chain.fetch(url)
        except SearchError as error:
            raise FetchError(str(error)) from error
        if document is None:
            raise FetchError("the corpus has no such document; search to find what it has")
        return Page(
            url=document.url, title=document.title, text=document.text, links=document.links, anchors=document.anchors
        )
