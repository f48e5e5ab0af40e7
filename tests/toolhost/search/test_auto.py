"""Which providers are asked, for what an operator configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolhost.browsing.sections import FileConverter
from toolhost.search.auto import SearchOptions, build_chain, provider_order, without_client
from toolhost.search.corpus import Corpus

EXA, TAVILY, BRAVE = ("exa", "k1"), ("tavily", "k2"), ("brave", "k3")


@pytest.mark.parametrize(
    ("options", "order"),
    [
        (SearchOptions(), ("corpus",)),
        (SearchOptions(keys=(BRAVE, EXA)), ("exa", "brave", "corpus")),
        (SearchOptions(keys=(("exa", ""),)), ("corpus",)),
        (SearchOptions(searxng_url="http://127.0.0.1:1"), ("searxng", "corpus")),
        (SearchOptions(keyless=True), ("ddgs", "corpus")),
        (
            SearchOptions(keys=(TAVILY,), searxng_url="http://127.0.0.1:1", keyless=True),
            ("tavily", "searxng", "ddgs", "corpus"),
        ),
        (SearchOptions("brave", keys=(EXA, BRAVE)), ("brave", "corpus")),
        (SearchOptions("corpus", keys=(EXA,)), ("corpus",)),
        (SearchOptions("ddgs"), ("ddgs", "corpus")),
    ],
)
async def test_the_order(options: SearchOptions, order: tuple[str, ...], tmp_path: Path) -> None:
    assert provider_order(options) == order
    chain = build_chain(options, Corpus(tmp_path / "c.sqlite", FileConverter()))
    assert chain.names == order
    await chain.aclose()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (SearchOptions("exa"), "search by exa needs its API key"),
        (SearchOptions("searxng"), "needs the URL of an instance"),
        (SearchOptions("bing"), "there are: auto, exa, tavily, brave, searxng, ddgs, corpus"),
    ],
)
def test_a_choice_that_lacks_something_says_what(options: SearchOptions, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        provider_order(options)


def test_a_provider_whose_client_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SearchOptions(keys=(("exa", "k"), ("tavily", "k")), keyless=True)
    monkeypatch.setattr("toolhost.search.auto.find_spec", lambda name: None)
    assert without_client(options) == ["exa", "ddgs"]
    monkeypatch.setattr("toolhost.search.auto.find_spec", lambda name: object())
    assert without_client(options) == []
