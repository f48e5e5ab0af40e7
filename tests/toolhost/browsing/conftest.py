"""A browser over a local web server and a scripted search provider; nothing here leaves loopback."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.real_pages import CannotGet, real_pages
from toolhost.browsing.browser import Browser
from toolhost.browsing.errors import BrowserError
from toolhost.browsing.estimate import estimate_tokens
from toolhost.browsing.fetch import Fetcher, FetchLimits
from toolhost.browsing.guard import Guard
from toolhost.browsing.loader import PageLoader
from toolhost.browsing.state import BrowserState
from toolhost.search.base import Document, Filters, Hit, SearchError
from toolhost.search.chain import SearchChain
from toolhost.search.retry import RetryPolicy

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ScriptedProvider:
    """Gives the hits it was told to, or raises the error."""

    name: str = "scripted"
    hits: list[Hit] = field(default_factory=list)
    error: SearchError | None = None
    asked: list[tuple[str, int]] = field(default_factory=list)

    async def search(self, query: str, n: int, filters: Filters) -> list[Hit]:
        self.asked.append((query, n))
        if self.error is not None:
            raise self.error
        return self.hits

    async def fetch(self, url: str) -> Document | None:
        return None

    async def aclose(self) -> None:
        pass


class Site:
    """A web server whose pages a test sets: text (HTML), bytes, or a handler."""

    def __init__(self) -> None:
        self.pages: dict[str, str | Handler] = {}
        self.requests: list[web.Request] = []
        self.base = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        page = self.pages.get(request.path)
        if page is None:
            return web.Response(status=404)
        if isinstance(page, str):
            return web.Response(text=page, content_type="text/html")
        return await page(request)

    def bytes(self, path: str, body: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> str:
        """Set a page to fixed bytes; returns its URL."""

        async def answer(_: web.Request) -> web.StreamResponse:
            return web.Response(body=body, headers={"Content-Type": content_type, **(headers or {})})

        self.pages[path] = answer
        return self.base + path

    def html(self, path: str, body: str, title: str = "T") -> str:
        """Set a page to a document with this body; returns its URL."""
        self.pages[path] = f"<html><head><title>{title}</title></head><body>{body}</body></html>"
        return self.base + path


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    made.base = f"http://127.0.0.1:{server.port}"
    yield made
    await server.close()


@dataclass
class Desk:
    """A browser with what a test wants to look at."""

    browser: Browser
    state: BrowserState
    provider: ScriptedProvider
    fetcher: Fetcher
    chain: SearchChain
    loader: PageLoader

    async def call(self, tool: str, **arguments: Any) -> str:
        """The text the model would get."""
        try:
            return await self.browser.call(tool, arguments)
        except BrowserError as error:
            return str(error)

    def again(self, state: BrowserState, **options: Any) -> Desk:
        """Another browser on the same host with its own state."""
        browser = Browser(state, self.loader, self.chain, estimate_tokens, **options)
        return Desk(browser, state, self.provider, self.fetcher, self.chain, self.loader)


@pytest.fixture
async def desk(site: Site) -> AsyncIterator[Desk]:
    fetcher = Fetcher(
        Guard(allow_networks=[LOOPBACK], ports=range(1, 65536)),
        limits=FetchLimits(seconds=10),
        retry=RetryPolicy(attempts=3, delay=0.01),
    )
    provider = ScriptedProvider()
    chain = SearchChain([provider], retry=RetryPolicy(delay=0.01))
    loader = PageLoader(fetcher, chain)
    state = BrowserState()
    yield Desk(Browser(state, loader, chain, estimate_tokens), state, provider, fetcher, chain, loader)
    await fetcher.aclose()
    await chain.aclose()


@pytest.fixture(scope="session")
def pages(request: pytest.FixtureRequest) -> dict[str, str]:
    """The pages by name. They are kept in pytest's cache folder, so a machine fetches them once."""
    try:
        return real_pages(Path(request.config.cache.mkdir("real-pages")))  # type: ignore[union-attr]
    except CannotGet as error:
        pytest.skip(str(error))
