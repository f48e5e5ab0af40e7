"""One contract, run on every provider against a local server that speaks each one's API, well and badly."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from toolhost.search.base import Document, DomainList, Failure, Filters, SearchError, SearchProvider
from toolhost.search.chain import SearchChain
from toolhost.search.corpus import Converted, Corpus, Section
from toolhost.search.registry import PROVIDERS, create
from toolhost.search.retry import RetryPolicy

ANY = Filters()
STOP = web.AppKey("stop", asyncio.Event)
Record = dict[str, Any]
RECORDS: list[Record] = [
    {"title": f"Title {n}", "url": f"https://site{n}.example/p?it's={n}", "text": f"Summary <b>{n}</b> & more"}
    for n in range(5)
]


@dataclass
class Service:
    """The server: how it answers, and what it was asked."""

    base: str = ""
    records: list[Record] = field(default_factory=lambda: RECORDS)
    answers: list[Callable[[web.Request, bytes], Any]] = field(default_factory=list)
    requests: list[tuple[web.Request, str]] = field(default_factory=list)
    encode: Callable[[list[Record]], bytes] = lambda records: b""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request, await request.text()))
        body = self.encode(self.records)
        if self.answers:
            answer = self.answers.pop(0)(request, body)
            return await answer if asyncio.iscoroutine(answer) else answer  # type: ignore[no-any-return]
        return web.Response(body=body, content_type="application/json")


def status(code: int, **headers: str) -> Callable[[web.Request, bytes], web.Response]:
    return lambda request, body: web.Response(status=code, headers=headers, text="no")


def raw(change: Callable[[bytes], bytes]) -> Callable[[web.Request, bytes], web.Response]:
    return lambda request, body: web.Response(body=change(body), content_type="application/json")


async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(body[:10])
    await request.app[STOP].wait()
    return response


def present(record: Record, **names: str) -> Record:
    """The record under an API's own names, without what it does not have."""
    return {name: record[key] for key, name in names.items() if key in record}


def exa(records: list[Record]) -> bytes:
    results = []
    for record in records:
        entry = present(record, title="title", url="url")
        if "text" in record:
            entry |= {"highlights": [record["text"]], "highlightScores": [0.5]}
        results.append({"id": record.get("url", ""), "url": "", **entry})
    return json.dumps({"requestId": "r", "results": results}).encode()


def tavily(records: list[Record]) -> bytes:
    found = [present(record, title="title", url="url", text="content") | {"score": 0.9} for record in records]
    return json.dumps({"query": "q", "results": found, "response_time": 1.0}).encode()


def brave(records: list[Record]) -> bytes:
    found = [present(record, title="title", url="url", text="description") for record in records]
    for entry in found:
        if "description" in entry:
            entry["description"] = f"<strong>{entry['description'].replace('&', '&amp;').replace('<', '&lt;')}</strong>"
    return json.dumps({"type": "search", "web": {"type": "search", "results": found}}).encode()


def searxng(records: list[Record]) -> bytes:
    found = [present(record, title="title", url="url", text="content") | {"engine": "x"} for record in records]
    return json.dumps({"query": "q", "results": found, "answers": [], "suggestions": []}).encode()


def ddgs(records: list[Record]) -> bytes:
    from html import escape

    blocks = "".join(
        f'<div class="links_main result__body"><h2>{escape(record.get("title", ""))}</h2>'
        f'<a href="{escape(record.get("url", ""))}">{escape(record.get("text", ""))}</a></div>'
        for record in records
    )
    return f"<html><body>{blocks}</body></html>".encode()


def convert(path: Path, url: str) -> Converted:
    title, text = path.read_text().split("\n", 1)
    return Converted(Document(url, title, f"\nURL: {url}\n{text}"), (Section(2, "", text),))


ENCODERS = {"exa": exa, "tavily": tavily, "brave": brave, "searxng": searxng, "ddgs": ddgs}
# Differences every user of a provider should know; the contract holds but for these.
HIDES_STATUS = {"ddgs"}  # its package turns every HTTP failure into "no results"
LOCAL = {"corpus"}  # it asks nobody


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    app = web.Application()
    app[STOP] = asyncio.Event()
    app.router.add_route("*", "/{path:.*}", made.handle)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    made.base = f"http://127.0.0.1:{server.port}"
    yield made
    app[STOP].set()
    await server.close()


@pytest.fixture(params=sorted(PROVIDERS))
async def provider(
    request: pytest.FixtureRequest, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SearchProvider]:
    """Every provider; a test that needs a service, or its statuses, narrows it with REMOTE or HONEST."""
    name: str = request.param
    if name in ENCODERS:
        service.encode = ENCODERS[name]
    made = build(name, service.base, tmp_path, monkeypatch)
    yield made
    await made.aclose()


REMOTE = pytest.mark.parametrize("provider", sorted(set(PROVIDERS) - LOCAL), indirect=True)
HONEST = pytest.mark.parametrize("provider", sorted(set(PROVIDERS) - LOCAL - HIDES_STATUS), indirect=True)


def build(name: str, base: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> SearchProvider:
    if name == "corpus":
        documents = folder / "docs"
        documents.mkdir()
        for number, record in enumerate(RECORDS):
            (documents / f"{number}.txt").write_text(f"{record['title']}\nq {record['text']}")
        corpus = Corpus(folder / "corpus.sqlite", convert)
        corpus.add(documents)
        return create("corpus", corpus=corpus)
    if name == "ddgs":
        pytest.importorskip("ddgs")
        monkeypatch.setattr("ddgs.engines.duckduckgo.Duckduckgo.search_url", f"{base}/html/")
        return create("ddgs", timeout=2)
    if name == "searxng":
        return create("searxng", base_url=base)
    if name == "exa":
        pytest.importorskip("exa_py")
    return create(name, api_key="the-key", base_url=base)


def chain(provider: SearchProvider, deadline: float = 10) -> SearchChain:
    return SearchChain([provider], deadline=deadline, retry=RetryPolicy(attempts=3, delay=0.01))


async def test_hits_have_title_url_and_snippet(provider: SearchProvider) -> None:
    outcome = await chain(provider).search("q", 3, ANY)
    assert len(outcome.hits) == 3 and outcome.source == provider.name and outcome.failed == ()
    for hit in outcome.hits:
        assert hit.title.startswith("Title ") and "Summary" in hit.snippet and "&amp;" not in hit.snippet
        number = hit.title.removeprefix("Title ")
        if provider.name in LOCAL:
            assert hit.url == f"corpus://docs/{number}.txt" and hit.line == 2
        else:
            assert hit.url == f"https://site{number}.example/p?it's={number}" and hit.line is None
    assert len({hit.url for hit in outcome.hits}) == 3


@REMOTE
async def test_the_key_and_the_query_are_sent(provider: SearchProvider, service: Service) -> None:
    await chain(provider).search("wörds & more", 4, ANY)
    request, body = service.requests[0]
    fields = dict(parse_qsl(body)) if provider.name == "ddgs" else json.loads(body or "{}")
    sent = {**request.query, **fields}
    assert "wörds & more" in sent.values(), sent
    if provider.name in ("exa", "tavily", "brave"):
        assert "the-key" in " ".join(request.headers.values())
    if provider.name in ("exa", "tavily", "brave"):
        assert "4" in map(str, sent.values())


@REMOTE
async def test_domain_lists_reach_the_result(provider: SearchProvider) -> None:
    only = Filters((DomainList.of(allow=["site1.example", "site3.example"], deny=["site3.example"]),))
    outcome = await chain(provider).search("q", 5, only)
    assert [hit.title for hit in outcome.hits] == ["Title 1"]


async def test_no_results_are_an_empty_outcome(provider: SearchProvider, service: Service) -> None:
    service.records = []
    query = "absent" if provider.name in LOCAL else "q"
    assert (await chain(provider).search(query, 5, ANY)).hits == ()


@REMOTE
async def test_missing_fields_lose_no_other_hit(provider: SearchProvider, service: Service) -> None:
    service.records = [{}, {"url": "https://bare.example/"}, {"title": "no url"}, RECORDS[0]]
    outcome = await chain(provider).search("q", 5, ANY)
    assert [hit.url for hit in outcome.hits] == ["https://bare.example/", RECORDS[0]["url"]]
    assert outcome.hits[0].title == "" and outcome.hits[0].snippet == ""


@HONEST
@pytest.mark.parametrize("code", [429, 503, 500])
async def test_a_transient_failure_is_retried(provider: SearchProvider, service: Service, code: int) -> None:
    service.answers = [status(code)]
    assert (await chain(provider).search("q", 2, ANY)).hits
    assert len(service.requests) == 2


@HONEST
async def test_retry_after_is_waited_for(provider: SearchProvider, service: Service) -> None:
    service.answers = [status(429, **{"Retry-After": "1"})]
    start = time.monotonic()
    assert (await chain(provider).search("q", 2, ANY)).hits
    assert time.monotonic() - start >= 1


@HONEST
@pytest.mark.parametrize(
    ("code", "failure", "requests"),
    [
        (429, Failure.QUOTA, 3),
        (503, Failure.NETWORK, 3),
        (401, Failure.KEY, 1),
        (403, Failure.KEY, 1),
        (402, Failure.QUOTA, 1),
        (400, Failure.QUERY, 1),
        (422, Failure.QUERY, 1),
    ],
)
async def test_statuses_have_their_failures(
    provider: SearchProvider, service: Service, code: int, failure: Failure, requests: int
) -> None:
    service.answers = [status(code)] * 9
    with pytest.raises(SearchError, match=f"HTTP {code}") as caught:
        await chain(provider).search("q", 2, ANY)
    assert caught.value.failure is failure and len(service.requests) == requests
    assert "the-key" not in str(caught.value)


@HONEST
@pytest.mark.parametrize(
    "change",
    [
        lambda body: body[: len(body) // 2],
        lambda body: b"",
        lambda body: b"[]",
        lambda body: b'"text"',
        lambda body: b"<html>not json</html>",
        lambda body: b'{"results": {"a": 1}, "web": 5}',
        lambda body: b'{"results": 7, "web": {"results": "x"}}',
        lambda body: b"\xff\xfe\x00",
        lambda body: b"[" * 100_000,
    ],
    ids=["truncated", "empty", "list", "text", "html", "object", "number", "bytes", "nested"],
)
async def test_an_answer_of_another_form_is_an_error(
    provider: SearchProvider, service: Service, change: Callable[[bytes], bytes]
) -> None:
    service.answers = [raw(change)] * 9
    with pytest.raises(SearchError) as caught:
        await chain(provider).search("q", 2, ANY)
    assert caught.value.failure is Failure.ANSWER and len(service.requests) == 1


@REMOTE
async def test_a_slow_body_ends_at_the_deadline(provider: SearchProvider, service: Service) -> None:
    service.answers = [slow] * 9
    with pytest.raises(SearchError, match="did not answer in time") as caught:
        await asyncio.wait_for(chain(provider, deadline=0.7).search("q", 2, ANY), 5)
    assert caught.value.failure is Failure.NETWORK


async def test_a_refused_connection_is_a_network_failure(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{probe.getsockname()[1]}"
    for name in sorted(set(PROVIDERS) - LOCAL):
        provider = build(name, base, tmp_path, monkeypatch)
        with pytest.raises(SearchError) as caught:
            await chain(provider).search("q", 2, ANY)
        assert caught.value.failure is Failure.NETWORK, name
        await provider.aclose()


async def test_fetch_gives_only_what_is_its_own(provider: SearchProvider) -> None:
    assert await provider.fetch("https://site1.example/") is None
    document = await provider.fetch("corpus://docs/1.txt")
    assert (document is not None) == (provider.name in LOCAL)


def test_an_unknown_provider_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="there are: exa, tavily, brave, searxng, ddgs, corpus"):
        create("gogle")
