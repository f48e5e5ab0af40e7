"""Which providers a host uses, from what its operator configured."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from toolhost.search.base import SearchProvider
from toolhost.search.chain import DEADLINE, SearchChain
from toolhost.search.corpus import Corpus, CorpusSearch
from toolhost.search.registry import PROVIDERS, create

AUTO = "auto"
KEYED = ("exa", "tavily", "brave")
CLIENTS = {
    "exa": "exa_py",
    "ddgs": "ddgs",
}  # the libraries that are looked for at the first search only, and so not missed at the start


@dataclass(frozen=True)
class SearchOptions:
    """What the operator configured.

    Attributes:
        choice: `auto`, or the name of a provider.
        keys: API keys by provider name; an empty one counts as none.
        searxng_url: Where a SearXNG instance is.
        keyless: Online search without a key (the ddgs package) is permitted.
        deadline: Seconds for one search in all.
    """

    choice: str = AUTO
    keys: tuple[tuple[str, str], ...] = ()
    searxng_url: str | None = None
    keyless: bool = False
    deadline: float = DEADLINE


def provider_order(options: SearchOptions) -> tuple[str, ...]:
    """Names of the providers to ask, in order; the corpus is always last.

    `auto` takes every configured key, then SearXNG, then keyless search if that is permitted.

    Raises:
        ValueError: the choice is unknown or lacks what it needs; the text says what.
    """
    keys = {name for name, key in options.keys if key}
    if options.choice == AUTO:
        order = [name for name in KEYED if name in keys]
        order += ["searxng"] * bool(options.searxng_url) + ["ddgs"] * options.keyless
        return (*order, "corpus")
    if options.choice not in PROVIDERS:
        raise ValueError(f"unknown search provider {options.choice!r}; there are: {AUTO}, {', '.join(PROVIDERS)}")
    if options.choice in KEYED and options.choice not in keys:
        raise ValueError(f"search by {options.choice} needs its API key")
    if options.choice == "searxng" and not options.searxng_url:
        raise ValueError("search by searxng needs the URL of an instance")
    return (options.choice,) if options.choice == "corpus" else (options.choice, "corpus")


def without_client(options: SearchOptions) -> list[str]:
    """Providers in `provider_order` whose client library is not installed: every search of theirs will fail."""
    return [name for name in provider_order(options) if name in CLIENTS and find_spec(CLIENTS[name]) is None]


def build_chain(options: SearchOptions, corpus: Corpus) -> SearchChain:
    """The chain of the providers in `provider_order`. It closes the corpus with itself. Raises ValueError likewise."""
    keys = dict(options.keys)
    providers: list[SearchProvider] = []
    for name in provider_order(options):
        if name in KEYED:
            providers.append(create(name, api_key=keys[name]))
        elif name == "searxng":
            providers.append(create(name, base_url=options.searxng_url))
        elif name == "corpus":
            providers.append(CorpusSearch(corpus))
        else:
            providers.append(create(name))
    return SearchChain(providers, deadline=options.deadline)
