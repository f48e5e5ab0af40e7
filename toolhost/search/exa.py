"""Exa (https://docs.exa.ai) through its own client, exa-py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolhost.search.base import Document, Failure, Filters, Hit, SearchError
from toolhost.search.http import status_error
from toolhost.search.retry import Transient

if TYPE_CHECKING:
    import httpx
    from exa_py import AsyncExa

API = "https://api.exa.ai"
# Seconds the client waits for the service; the chain's deadline is usually shorter.
TIMEOUT = 30.0
MAX_TEXT = 500


class Exa:
    """Search by Exa.

    Args:
        api_key: Key of the service.
        base_url: Where its API is.
    """

    name = "exa"

    def __init__(self, api_key: str, base_url: str = API) -> None:
        self._api_key = api_key
        self._base_url = base_url
        self._client: AsyncExa | None = None

    def _exa(self) -> AsyncExa:
        if self._client is None:
            # Late, because importing the client takes about as long as starting the rest of the host.
            try:
                from exa_py import AsyncExa
            except ModuleNotFoundError as error:
                raise SearchError(Failure.KEY, "Exa needs its client: pip install 'toolhost[exa]'") from error
            self._client = AsyncExa(api_key=self._api_key, api_base=self._base_url, timeout=TIMEOUT)
            # The client tells statuses only in the text of a ValueError and drops Retry-After.
            self._client.client.event_hooks["response"].append(self._check)
        return self._client

    async def _check(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            raise status_error(self.name, response.status_code, response.headers.get("Retry-After"))

    async def search(self, query: str, n: int, filters: Filters) -> list[Hit]:
        """See `SearchProvider.search`."""
        options: dict[str, Any] = {}
        if filters.allow:
            options["include_domains"] = list(filters.allow)
        if filters.deny:
            options["exclude_domains"] = list(filters.deny)
        client = self._exa()
        import httpx  # the client's own, so it is loaded by now

        try:
            answer = await client.search(query, num_results=n, contents={"highlights": True}, **options)
        except httpx.TransportError as error:
            raise Transient(f"{self.name} cannot be reached: {type(error).__name__}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SearchError(Failure.ANSWER, f"{self.name} sent an answer of an unknown form") from error
        return [_hit(result) for result in answer.results or []]

    async def fetch(self, url: str) -> Document | None:
        """Nothing: pages come from the web."""
        return None

    async def aclose(self) -> None:
        """See `SearchProvider.aclose`."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _hit(result: Any) -> Hit:
    highlights = getattr(result, "highlights", None) or []
    snippet = " … ".join(part for part in highlights if isinstance(part, str))
    return Hit(
        title=_text(result, "title"),
        url=_text(result, "url"),
        snippet=snippet or _text(result, "summary") or _text(result, "text")[:MAX_TEXT],
        date=_text(result, "published_date") or None,
    )


def _text(result: Any, attribute: str) -> str:
    value = getattr(result, attribute, None)
    return value if isinstance(value, str) else ""
