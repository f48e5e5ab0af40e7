"""The order providers are asked in, and what makes the next one be asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from toolhost.search.base import Document, Failure, Filters, Hit, SearchError
from toolhost.search.chain import SearchChain
from toolhost.search.retry import RetryPolicy, Transient

ANY = Filters()


@dataclass
class Scripted:
    """Raises its errors in turn, then gives one hit."""

    name: str
    errors: list[Exception] = field(default_factory=list)
    hang: bool = False
    asked: int = 0

    async def search(self, query: str, n: int, filters: Filters) -> list[Hit]:
        self.asked += 1
        if self.hang:
            await asyncio.sleep(60)
        if self.errors:
            raise self.errors.pop(0)
        return [Hit(self.name, f"https://{self.name}.example/", "")]

    async def fetch(self, url: str) -> Document | None:
        return Document(url, self.name, "t") if url.startswith(f"{self.name}:") else None

    async def aclose(self) -> None:
        self.asked = -1


def chain(*providers: Scripted, deadline: float = 5) -> SearchChain:
    return SearchChain(providers, deadline=deadline, retry=RetryPolicy(attempts=2, delay=0.01))


@pytest.mark.parametrize("failure", [Failure.KEY, Failure.QUOTA, Failure.NETWORK])
async def test_key_quota_and_network_failures_fall_back(failure: Failure) -> None:
    first, second = Scripted("a", [SearchError(failure, "why")]), Scripted("b")
    outcome = await chain(first, second).search("q", 5, ANY)
    assert (outcome.source, outcome.failed) == ("b", ("why",))


@pytest.mark.parametrize("failure", [Failure.ANSWER, Failure.QUERY])
async def test_other_failures_do_not(failure: Failure) -> None:
    first, second = Scripted("a", [SearchError(failure, "why")]), Scripted("b")
    with pytest.raises(SearchError, match=r"^why$"):
        await chain(first, second).search("q", 5, ANY)
    assert second.asked == 0


async def test_a_first_provider_that_hangs_leaves_time_for_the_second() -> None:
    outcome = await chain(Scripted("a", hang=True), Scripted("b"), deadline=0.6).search("q", 5, ANY)
    assert (outcome.source, outcome.failed) == ("b", ("a did not answer in time",))


async def test_when_all_fail_every_reason_is_told() -> None:
    first, second = (Scripted(name, [Transient(f"{name} is down", status=503)] * 2) for name in "ab")
    with pytest.raises(SearchError, match=r"^a is down; b is down$"):
        await chain(first, second).search("q", 5, ANY)
    assert (first.asked, second.asked) == (2, 2)


async def test_a_source_named_is_asked_alone_and_an_unknown_one_is_ignored() -> None:
    first, second = Scripted("a"), Scripted("b")
    assert (await chain(first, second).search("q", 5, ANY, "b")).source == "b"
    assert first.asked == 0
    assert (await chain(first, second).search("q", 5, ANY, "web")).source == "a"


async def test_no_results_do_not_fall_back() -> None:
    first = Scripted("a")
    first.search = lambda query, n, filters: asyncio.sleep(0, [])  # type: ignore[method-assign,assignment,return-value]
    assert (await chain(first, Scripted("b")).search("q", 5, ANY)).source == "a"


async def test_the_provider_that_has_a_page_gives_it_and_all_are_closed() -> None:
    first, second = Scripted("a"), Scripted("b")
    both = chain(first, second)
    document = await both.fetch("b:x")
    assert document is not None and document.title == "b"
    assert await both.fetch("c:x") is None
    await both.aclose()
    assert (first.asked, second.asked) == (-1, -1)


def test_a_chain_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a provider"):
        SearchChain([])
