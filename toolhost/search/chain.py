"""Providers in order of preference: the first answers; others only when a key, a quota or the network fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from toolhost.search.base import Document, Failure, Filters, Hit, SearchError, SearchProvider
from toolhost.search.retry import RetryPolicy, Transient, with_retries

# Seconds for one search, all retries and fallbacks included.
DEADLINE = 30.0
_FALL_BACK = frozenset({Failure.KEY, Failure.QUOTA, Failure.NETWORK})


@dataclass(frozen=True)
class Outcome:
    """Hits, who gave them, and why those asked before did not."""

    hits: tuple[Hit, ...]
    source: str
    failed: tuple[str, ...] = ()


class SearchChain:
    """Asks providers in order.

    Args:
        providers: At least one.
        deadline: Seconds a search may take in all.
        retry: How each provider's transient failures are retried.
    """

    def __init__(
        self, providers: Sequence[SearchProvider], *, deadline: float = DEADLINE, retry: RetryPolicy | None = None
    ) -> None:
        if not providers:
            raise ValueError("a search chain needs a provider")
        self._providers = tuple(providers)
        self._deadline = deadline
        self._retry = retry or RetryPolicy()

    @property
    def names(self) -> tuple[str, ...]:
        """Providers in the order they are asked."""
        return tuple(provider.name for provider in self._providers)

    async def search(self, query: str, n: int, filters: Filters, source: str | None = None) -> Outcome:
        """At most `n` hits that the filters permit.

        Args:
            source: Name of one provider of the chain to ask alone; any other name means the chain.

        Raises:
            SearchError: no provider answered.
        """
        chosen = [provider for provider in self._providers if provider.name == source] or list(self._providers)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline
        failed: list[str] = []
        failure = Failure.NETWORK
        for number, provider in enumerate(chosen):
            # Whoever is left must get a share of the time, or a hanging first provider would use it all.
            share = (end - loop.time()) / (len(chosen) - number)
            try:
                hits = await self._ask(provider, query, n, filters, loop.time() + max(share, 0.1))
            except SearchError as error:
                failed.append(str(error))
                failure = error.failure
                if failure not in _FALL_BACK:
                    break
            else:
                return Outcome(tuple(_permitted(hits, filters)[:n]), provider.name, tuple(failed))
        raise SearchError(failure, "; ".join(failed))

    async def _ask(self, provider: SearchProvider, query: str, n: int, filters: Filters, deadline: float) -> list[Hit]:
        try:
            async with asyncio.timeout_at(deadline):
                return await with_retries(lambda: provider.search(query, n, filters), self._retry, deadline)
        except TimeoutError as error:
            raise SearchError(Failure.NETWORK, f"{provider.name} did not answer in time") from error
        except Transient as error:
            raise SearchError(Failure.QUOTA if error.status == 429 else Failure.NETWORK, str(error)) from error

    async def fetch(self, url: str) -> Document | None:
        """The page at `url` from the first provider that has it, or None. Raises SearchError."""
        for provider in self._providers:
            try:
                document = await provider.fetch(url)
            except Transient as error:
                raise SearchError(Failure.NETWORK, str(error)) from error
            if document is not None:
                return document
        return None

    async def aclose(self) -> None:
        """Close every provider."""
        for provider in self._providers:
            await provider.aclose()


def _permitted(hits: Sequence[Hit], filters: Filters) -> list[Hit]:
    """Hits with a URL the filters permit, the first of each URL."""
    kept: dict[str, Hit] = {}
    for hit in hits:
        try:
            host = urlsplit(hit.url).hostname
        except ValueError:
            continue
        if host and filters.permits(host):
            kept.setdefault(hit.url, hit)
    return list(kept.values())
