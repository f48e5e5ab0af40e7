"""Providers by name. A provider is loaded when it is first named, so that its libraries cost nothing until then."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from toolhost.search.base import SearchProvider

PROVIDERS = {
    "exa": "toolhost.search.exa:Exa",
    "tavily": "toolhost.search.tavily:Tavily",
    "brave": "toolhost.search.brave:Brave",
    "searxng": "toolhost.search.searxng:SearXNG",
    "ddgs": "toolhost.search.duckduckgo:DuckDuckGo",
    "corpus": "toolhost.search.corpus:CorpusSearch",
}


def create(name: str, **options: object) -> SearchProvider:
    """Build a provider.

    Args:
        name: A key of `PROVIDERS`.
        options: Keyword arguments of its class.

    Raises:
        ValueError: there is no such provider.
        ModuleNotFoundError: its client library is not installed; the message names the extra to install.
    """
    if name not in PROVIDERS:
        raise ValueError(f"unknown search provider {name!r}; there are: {', '.join(PROVIDERS)}")
    module, _, attribute = PROVIDERS[name].partition(":")
    return cast(SearchProvider, getattr(import_module(module), attribute)(**options))
