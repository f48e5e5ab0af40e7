"""Brave Search (https://api-dashboard.search.brave.com/app/documentation): GET /res/v1/web/search."""

from __future__ import annotations

import html
import re

from toolhost.search.base import Document, Filters, Hit
from toolhost.search.http import JsonClient, entries, text_of

API = "https://api.search.brave.com"
MAX_COUNT = 20
_TAGS = re.compile(r"</?strong>")


class Brave:
    """Search by Brave.

    Args:
        api_key: Subscription token of the service.
        base_url: Where its API is.
    """

    name = "brave"

    def __init__(self, api_key: str, base_url: str = API) -> None:
        self._client = JsonClient(self.name, base_url, {"X-Subscription-Token": api_key, "Accept": "application/json"})

    async def search(self, query: str, n: int, filters: Filters) -> list[Hit]:
        """See `SearchProvider.search`. The API has no domain parameter: the query says it."""
        sites = " OR ".join(f"site:{domain}" for domain in filters.allow[:5])
        parameters = {
            "q": f"{query} {sites}".strip()[:400],
            "count": str(min(n, MAX_COUNT)),
            "text_decorations": "false",
        }
        answer = await self._client.get("/res/v1/web/search", parameters)
        return [
            Hit(
                title=_plain(text_of(entry, "title")),
                url=text_of(entry, "url"),
                snippet=_plain(text_of(entry, "description")),
                date=text_of(entry, "page_age", "age") or None,
            )
            for entry in entries(self.name, answer, "web", "results")
        ]

    async def fetch(self, url: str) -> Document | None:
        """Nothing: pages come from the web."""
        return None

    async def aclose(self) -> None:
        """See `SearchProvider.aclose`."""
        await self._client.aclose()


def _plain(text: str) -> str:
    """Brave escapes its texts as HTML and marks the words found."""
    return html.unescape(_TAGS.sub("", text))
