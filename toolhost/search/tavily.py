"""Tavily (https://docs.tavily.com): POST /search."""

from __future__ import annotations

from toolhost.search.base import Document, Filters, Hit
from toolhost.search.http import JsonClient, entries, text_of

API = "https://api.tavily.com"


class Tavily:
    """Search by Tavily.

    Args:
        api_key: Key of the service.
        base_url: Where its API is.
    """

    name = "tavily"

    def __init__(self, api_key: str, base_url: str = API) -> None:
        self._client = JsonClient(self.name, base_url, {"Authorization": f"Bearer {api_key}"})

    async def search(self, query: str, n: int, filters: Filters) -> list[Hit]:
        """See `SearchProvider.search`."""
        body: dict[str, object] = {"query": query, "max_results": n}
        if filters.allow:
            body["include_domains"] = list(filters.allow)
        if filters.deny:
            body["exclude_domains"] = list(filters.deny)
        answer = await self._client.post("/search", body)
        return [
            Hit(
                title=text_of(entry, "title"),
                url=text_of(entry, "url"),
                snippet=text_of(entry, "content"),
                date=text_of(entry, "published_date") or None,
            )
            for entry in entries(self.name, answer, "results")
        ]

    async def fetch(self, url: str) -> Document | None:
        """Nothing: pages come from the web."""
        return None

    async def aclose(self) -> None:
        """See `SearchProvider.aclose`."""
        await self._client.aclose()
