"""SearXNG (https://docs.searxng.org/dev/search_api.html): GET /search with format=json, which must be enabled there."""

from __future__ import annotations

from toolhost.search.base import Document, Filters, Hit
from toolhost.search.http import JsonClient, entries, text_of


class SearXNG:
    """Search by an instance of SearXNG.

    Args:
        base_url: Where the instance is.
    """

    name = "searxng"

    def __init__(self, base_url: str) -> None:
        self._client = JsonClient(self.name, base_url)

    async def search(self, query: str, n: int, filters: Filters) -> list[Hit]:
        """See `SearchProvider.search`."""
        answer = await self._client.get("/search", {"q": query, "format": "json"})
        return [
            Hit(
                title=text_of(entry, "title"),
                url=text_of(entry, "url"),
                snippet=text_of(entry, "content"),
                date=text_of(entry, "publishedDate") or None,
            )
            for entry in entries(self.name, answer, "results")
        ]

    async def fetch(self, url: str) -> Document | None:
        """Nothing: pages come from the web."""
        return None

    async def aclose(self) -> None:
        """See `SearchProvider.aclose`."""
        await self._client.aclose()
