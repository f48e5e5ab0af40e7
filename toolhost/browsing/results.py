"""The page of search results."""

from __future__ import annotations

from urllib.parse import urlsplit

from toolhost.browsing.links import host_of
from toolhost.browsing.loader import CORPUS_SCHEME
from toolhost.browsing.page import Page, one_line, with_url_line
from toolhost.search.base import Hit
from toolhost.search.chain import Outcome

MAX_SNIPPET = 1000


def results_page(query: str, outcome: Outcome) -> Page:
    """The page for what a search gave. Providers' texts are hostile: they become one plain line each."""
    hits = [hit for hit in outcome.hits if _can_open(hit.url)]
    lines = [_entry(number, hit) for number, hit in enumerate(hits)]
    if not lines:
        lines = [f"No results found for `{one_line(query)}`. Try other or fewer words."]
    if outcome.failed:
        lines += ["", f"(Source: {outcome.source}, because {one_line('; '.join(outcome.failed), 500)}.)"]
    return Page(
        url="",
        title=one_line(query),
        text=with_url_line("", "\n".join(["# Search Results", "", *lines])),
        links=tuple(hit.url for hit in hits),
        link_lines={number: hit.line for number, hit in enumerate(hits) if hit.line is not None},
        kind="search",
    )


def _can_open(url: str) -> bool:
    return url.lower().startswith(("http://", "https://", CORPUS_SCHEME)) and "\n" not in url


def _entry(number: int, hit: Hit) -> str:
    host = host_of(hit.url)
    title = one_line(hit.title).replace("†", "‡") or host + urlsplit(hit.url).path
    mark = f"  * 【{number}†{one_line(title)}†{host}】"
    snippet = one_line(hit.snippet, MAX_SNIPPET)
    return f"{mark} {snippet}".rstrip()
