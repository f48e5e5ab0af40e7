"""Keyless search through the ddgs package, which reads search engines' own pages. Off unless the operator allows it."""

from __future__ import annotations

import asyncio
from typing import Any

from toolhost.search.base import Document, Failure, Filters, Hit, SearchError
from toolhost.search.http import text_of
from toolhost.search.retry import Transient

TIMEOUT = 10


class DuckDuckGo:
    """Search by DuckDuckGo.

    Args:
        backend: Engine of the ddgs package.
        timeout: Seconds a request may take; a search given up before keeps its thread that long.

    The package hides HTTP statuses: being refused looks like finding nothing.
    """

    name = "ddgs"

    def __init__(self, backend: str = "duckduckgo", timeout: int = TIMEOUT) -> None:
        self._backend = backend
        self._timeout = timeout

    async def search(self, query: str, n: int, filters: Filters) -> list[Hit]:
        """See `SearchProvider.search`. The package is synchronous: it works in a thread, with a timeout of its own."""
        sites = " OR ".join(f"site:{domain}" for domain in filters.allow[:5])
        found = await asyncio.to_thread(self._search, f"{query} {sites}".strip(), n)
        return [
            Hit(title=text_of(entry, "title"), url=text_of(entry, "href"), snippet=text_of(entry, "body"))
            for entry in found
        ]

    def _search(self, query: str, n: int) -> list[dict[str, Any]]:
        try:
            from ddgs import DDGS
            from ddgs.exceptions import DDGSException, RatelimitException
        except ModuleNotFoundError as error:
            raise SearchError(Failure.KEY, "ddgs is not installed: pip install 'toolhost[ddgs]'") from error
        try:
            with DDGS(timeout=self._timeout) as client:
                return list(client.text(query, max_results=n, backend=self._backend))
        except RatelimitException as error:
            raise Transient("ddgs was told to slow down", status=429) from error
        except DDGSException as error:
            if "No results" in str(error):
                return []
            raise Transient(f"ddgs failed: {type(error).__name__}") from error

    async def fetch(self, url: str) -> Document | None:
        """Nothing: pages come from the web."""
        return None

    async def aclose(self) -> None:
        """Nothing is kept open."""
