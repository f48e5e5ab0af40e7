"""What all sessions' browsers share: search providers, the fetcher, the token counter, the operator's domain lists.

Above it: the browser namespace. Below it: settings, `browser.Browser`, the search chain.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path

from toolhost.browsing.browser import Browser
from toolhost.browsing.fetch import Fetcher, FetchLimits
from toolhost.browsing.guard import Guard
from toolhost.browsing.loader import PageLoader
from toolhost.browsing.own_documents import add_own_documents
from toolhost.browsing.sections import FileConverter
from toolhost.browsing.state import BrowserState
from toolhost.browsing.tokens import TokenCounter, token_counter
from toolhost.config import Settings
from toolhost.errors import ConfigurationError
from toolhost.identity import Domains
from toolhost.search.auto import SearchOptions, build_chain, provider_order
from toolhost.search.base import DomainList, Filters
from toolhost.search.chain import SearchChain
from toolhost.search.corpus import Corpus, CorpusError

log = logging.getLogger("toolhost.browser")

# Seconds that a start waits for the own documents; a busy index must not keep the host from serving.
INDEXING_S = 5.0


class BrowserService:
    """One for the whole host. `open` before the first call, `close` after the last.

    Raises ConfigurationError: the search settings cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        browser = settings.browser
        self._options = search_options(settings)
        try:
            self.providers = provider_order(self._options)
        except ValueError as error:
            raise ConfigurationError(f"search: {error}") from None
        lists = DomainList.of(browser.allow_domains, browser.deny_domains)
        self._filters = Filters().narrowed(lists)
        self._chain: SearchChain | None = None
        self._loader: PageLoader | None = None
        self._fetcher: Fetcher | None = None
        self._count: TokenCounter | None = None
        self._indexing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Opens the index and brings the own documents up to date. Raises ConfigurationError."""
        settings = self._settings.browser
        file = self._settings.corpus_file
        try:
            corpus = await asyncio.to_thread(Corpus, file, FileConverter())
        except (CorpusError, OSError) as error:
            raise ConfigurationError(f"the browser's index cannot be used: {error}") from None
        self._chain = build_chain(self._options, corpus)
        if settings.web:
            self._fetcher = Fetcher(
                Guard(allow_networks=settings.allow_networks, ports=settings.ports),
                limits=FetchLimits(max_bytes=settings.max_page_bytes),
                proxy=settings.proxy,
            )
        self._loader = PageLoader(self._fetcher, self._chain)
        self._count = await asyncio.to_thread(_counter, settings.vocabulary_dir)
        self._indexing = asyncio.create_task(self._index(corpus), name="index-own-documents")
        await asyncio.wait((self._indexing,), timeout=INDEXING_S)

    async def _index(self, corpus: Corpus) -> None:
        try:
            await asyncio.to_thread(add_own_documents, corpus)
        except (CorpusError, OSError, sqlite3.Error) as error:
            log.warning("the host's own documents could not be indexed: %s", error)

    async def close(self) -> None:
        """Lets go of connections and the index. Never raises."""
        if self._indexing is not None:
            await asyncio.wait((self._indexing,))  # its thread cannot be stopped
        if self._fetcher is not None:
            await self._fetcher.aclose()
        if self._chain is not None:
            await self._chain.aclose()
        self._chain = self._loader = self._fetcher = None

    def browser(self, state: BrowserState, domains: Domains) -> Browser:
        """A session's browser for one call, narrowed to a connection's domains."""
        if self._chain is None or self._loader is None or self._count is None:
            raise RuntimeError("the browser is not open")
        filters = self._filters
        for allowed in domains.allow:
            filters = filters.narrowed(DomainList.of(allow=allowed))
        return Browser(
            state,
            self._loader,
            self._chain,
            self._count,
            filters=filters.narrowed(DomainList.of(deny=domains.deny)),
            only_seen=self._settings.browser.only_seen,
            deadline=self._settings.browser.deadline_s,
        )


def search_options(settings: Settings) -> SearchOptions:
    """The search settings as the chain takes them."""
    search = settings.search
    keys = {"exa": search.exa_api_key, "tavily": search.tavily_api_key, "brave": search.brave_api_key}
    return SearchOptions(
        choice=search.provider,
        keys=tuple((name, key.get_secret_value()) for name, key in keys.items() if key is not None),
        searxng_url=search.searxng_url,
        keyless=search.keyless,
        deadline=search.deadline_s,
    )


def _counter(folder: Path | None) -> TokenCounter:
    """The counter of tokens. Raises ConfigurationError for a vocabulary that cannot be used."""
    try:
        return token_counter(folder)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"browser.vocabulary_dir: {error}") from error
