"""The search protocol: what a provider gets, gives and may raise.

Above it: `chain.SearchChain`, the only caller. Below it: one file a provider.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Failure(StrEnum):
    """Why a search failed. The first three make the chain ask the next provider."""

    KEY = "key"
    QUOTA = "quota"
    NETWORK = "network"
    ANSWER = "answer"
    QUERY = "query"


class SearchError(Exception):
    """A search failed; `str(error)` is the reason, fit for the model."""

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


@dataclass(frozen=True)
class Hit:
    """One search result, as the provider gave it: text is hostile and may be empty.

    Attributes:
        line: Display line of the passage in the page, when the provider knows it.
        date: Publication date as text, or None.
    """

    title: str
    url: str
    snippet: str
    date: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Document:
    """A page a provider has itself, already in the browser's text form.

    Attributes:
        text: Whole page text, its URL line included.
        links: Absolute URL of each link id.
        anchors: Fragment name to text line.
    """

    url: str
    title: str
    text: str
    links: tuple[str, ...] = ()
    anchors: Mapping[str, int] = field(default_factory=dict)


def _matches(host: str, domain: str) -> bool:
    return host == domain or host.endswith("." + domain)


@dataclass(frozen=True)
class DomainList:
    """Domains allowed (all, when empty) and denied; a domain stands for its subdomains too, and deny wins."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    @classmethod
    def of(cls, allow: tuple[str, ...] | list[str] = (), deny: tuple[str, ...] | list[str] = ()) -> DomainList:
        """A list from text as people write it: `*.Example.org`, `.example.org` and `example.org` are the same."""
        return cls(tuple(map(_normal, allow)), tuple(map(_normal, deny)))

    def permits(self, host: str) -> bool:
        """Whether a host name (no port) may be used."""
        host = _normal(host)
        if any(_matches(host, domain) for domain in self.deny):
            return False
        return not self.allow or any(_matches(host, domain) for domain in self.allow)


def _normal(domain: str) -> str:
    domain = domain.strip().lower().removeprefix("*.").strip(".")
    try:
        return domain if domain.isascii() else domain.encode("idna").decode()
    except UnicodeError:
        return domain


@dataclass(frozen=True)
class Filters:
    """Domain lists that must all permit a host: the operator's, and what a request narrows it to."""

    lists: tuple[DomainList, ...] = ()

    def narrowed(self, more: DomainList) -> Filters:
        """These filters and one more list; the result permits no host these refuse."""
        return Filters((*self.lists, more)) if more.allow or more.deny else self

    def permits(self, host: str) -> bool:
        """Whether every list permits the host."""
        return all(domains.permits(host) for domains in self.lists)

    @property
    def allow(self) -> tuple[str, ...]:
        """Domains to ask a provider for; empty for all."""
        every = {domain for domains in self.lists for domain in domains.allow}
        return tuple(sorted(domain for domain in every if self.permits(domain)))

    @property
    def deny(self) -> tuple[str, ...]:
        """Domains to keep a provider from."""
        return tuple(sorted({domain for domains in self.lists for domain in domains.deny}))


class SearchProvider(Protocol):
    """A source of search results. Built once, used by many sessions at a time."""

    name: str

    async def search(self, query: str, n: int, filters: Filters) -> list[Hit]:
        """At most `n` hits, best first. The chain calls it under a deadline and cancels it when that passes.

        Raises:
            SearchError: it failed for good.
            retry.Transient: it failed in a way worth another try; the chain decides.
        """
        ...

    async def fetch(self, url: str) -> Document | None:
        """The page at `url` if this provider has it itself, else None. Same errors as `search`."""
        ...

    async def aclose(self) -> None:
        """Let go of connections and files. Called once, at shutdown."""
        ...
