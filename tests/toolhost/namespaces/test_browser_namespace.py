"""The browser namespace over the wire, on a stand-in session manager; its pages come from the corpus."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest

from sandboxes.spec import KeyKind, SessionKey
from tests.toolhost.conftest import Host, StartHost
from tests.toolhost.rawclient import Stream, request
from toolhost.auth import Scope, mint
from toolhost.browsing.browser import Browser
from toolhost.browsing.page import Page
from toolhost.browsing.session import RESOURCE, BrowserSession
from toolhost.browsing.state import BrowserState

NO_NETWORK = """
import asyncio, sys
from pathlib import Path

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(watch)
from toolhost.browsing.service import BrowserService
from toolhost.browsing.browser import Browser
from toolhost.browsing.page import Page
from toolhost.browsing.session import BrowserSession
from toolhost.config import load
from toolhost.identity import NOT_NARROWED

async def main():
    service = BrowserService(load(flags={"state_dir": Path(sys.argv[1])}))
    print(*service.providers)
    await service.open()
    session = BrowserSession({})
    async def save(): pass
    for tool, arguments in (("search", {"query": "corpus"}), ("open", {"id": 0}), ("find", {"pattern": "corpus"})):
        print((await session.call(lambda state: service.browser(state, NOT_NARROWED), tool, arguments, save))[:4])
    await service.close()

asyncio.run(main())
"""


async def browser(host: Host, *headers: tuple[str, str], session: str = "a") -> Stream:
    return await host.connect("/browser/sse", [("x-session-id", session), *headers])


async def text_of(stream: Stream, tool: str, **arguments: Any) -> str:
    return str((await stream.tool(tool, arguments))["content"][0]["text"])


def test_with_no_key_only_the_corpus_is_asked_and_nothing_touches_the_network(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK, str(tmp_path / "state")],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["corpus", "[0]", "[1]", "[2]"]


async def test_names_with_junk_behind_them_and_arguments_in_other_forms_are_understood(host: Host) -> None:
    async with await browser(host) as stream:
        for name in ("search", "search ", "search<|channel|>commentary", "search<|constrain|>json"):
            result = await stream.tool(name, {"query": "corpus", "topn": "2", "nonsense": {}})
            assert result["isError"] is False
            assert "# Search Results" in result["content"][0]["text"]
        assert (await text_of(stream, "open", id="0", cursor=0.0, loc=None)).startswith("[4] ")


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("open", {}, "No pages to access!"),
        ("find", {"pattern": " "}, "Invalid `pattern` parameter: ``. It must be"),
        ("open", {"id": "http://127.0.0.1/"}, "Error fetching URL `http://127.0.0.1/`: its address is not on the"),
        ("open", {"id": "file:///etc/passwd"}, "Error fetching URL `file:///etc/passwd`: only http and https"),
        ("open", {"id": "corpus://toolhost/none.md"}, "Error fetching URL `corpus://toolhost/none.md`: the corpus has"),
    ],
)
async def test_errors_are_one_text_and_push_nothing(host: Host, tool: str, arguments: Any, text: str) -> None:
    async with await browser(host) as stream:
        result = await stream.tool(tool, arguments)
        assert result["isError"] is True
        (block,) = result["content"]
        assert block["text"].startswith(text)
        assert (await text_of(stream, "search", query="corpus")).startswith("[0] ")


async def test_a_connection_narrows_domains_and_a_header_sent_twice_narrows_twice(host: Host) -> None:
    opening = "corpus://toolhost/browser.md"
    async with await browser(host, ("x-toolhost-allow-domains", "example.org, toolhost")) as stream:
        assert "toolhost】" in await text_of(stream, "search", query="corpus")
        assert opening in await text_of(stream, "open", id=opening)
        assert opening in await text_of(stream, "open", id=0, cursor=0)
    async with await browser(host, ("x-toolhost-deny-domains", "toolhost")) as stream:
        assert "toolhost】" not in await text_of(stream, "search", query="corpus")
        assert "domain list" in await text_of(stream, "open", id=opening)
        assert "domain list" in await text_of(stream, "open", id=0, cursor=0), "also what the session has of it"
    twice = [("x-toolhost-allow-domains", "toolhost"), ("x-toolhost-allow-domains", "example.org")]
    async with await browser(host, *twice) as stream:
        assert "domain list" in await text_of(stream, "open", id=opening)


async def test_a_request_cannot_widen_what_the_operator_narrowed(start_host: StartHost) -> None:
    host = await start_host(browser={"allow_domains": ["example.org"]})
    async with await browser(host, ("x-toolhost-allow-domains", "toolhost")) as stream:
        assert "domain list" in await text_of(stream, "open", id="corpus://toolhost/browser.md")


@pytest.mark.parametrize("value", ["", " , ", "https://example.org/", "example.org;toolhost", "a b"])
async def test_a_domain_header_that_cannot_be_read_refuses_calls_and_is_not_guessed_at(host: Host, value: str) -> None:
    async with await browser(host, ("x-toolhost-allow-domains", value)) as stream:
        result = await stream.tool("search", {"query": "corpus"})
        assert result["isError"] is True
        assert "x-toolhost-allow-domains is not valid" in result["content"][0]["text"]


async def test_damaged_stored_pages_begin_anew_and_are_overwritten(host: Host) -> None:
    key = SessionKey("anonymous", KeyKind.REQUEST, "a")
    host.manager.saved[key, RESOURCE] = {"e7": b"\x00damaged"}
    async with await browser(host) as stream:
        assert await text_of(stream, "open") == "No pages to access!"
        assert (await text_of(stream, "search", query="corpus")).startswith("[0] ")
    assert host.manager.saved[key, RESOURCE].keys() == {"e0", "p0"}


class Pushing:
    """A browser whose every call pushes a page."""

    def __init__(self, state: BrowserState) -> None:
        self._state = state

    async def call(self, tool: str, arguments: object) -> str:
        return str(self._state.push(Page(f"http://{tool}/", tool, "text")))


async def test_a_store_that_fails_costs_no_page_and_the_next_call_commits_it() -> None:
    failures = [OSError("full")]
    session = BrowserSession({})
    stored: dict[str, bytes | None] = {}

    async def save() -> None:
        if failures:
            raise failures.pop()
        stored.update(session.changes())

    pushing = cast("Callable[[BrowserState], Browser]", Pushing)
    assert await session.call(pushing, "one", {}, save) == "0"
    assert await session.call(pushing, "two", {}, save) == "1"
    assert failures == []
    assert stored.keys() == {"e0", "p0", "e1", "p1"}


DEEP = b"[" * 100_000


async def test_citations_over_http_are_the_principals_own(start_host: StartHost, tmp_path: Path) -> None:
    (alice, first), (bob, second) = mint("alice", [Scope.USE]), mint("bob", [Scope.USE])
    file = tmp_path / "tokens"
    file.write_text(f"{first}\n{second}\n")
    host = await start_host(auth={"tokens_file": str(file)})
    as_alice = ("authorization", f"Bearer {alice}")
    async with await browser(host, as_alice) as stream:
        await text_of(stream, "search", query="corpus")
        await text_of(stream, "open", id="corpus://toolhost/browser.md")
    path = "/v1/sessions/request/a/citations"
    asked = f"{path}?citation={quote('【1†L1-L2】')}&citation={quote('【9†L1】')}&citation=x"
    answer = await request(host.port, asked, headers=[as_alice])
    good, beyond, odd = answer.json()["citations"]
    assert (good["url"], good["title"], good["evicted"]) == ("corpus://toolhost/browser.md", "The browser", False)
    assert good["lines"][0] == "URL: corpus://toolhost/browser.md"
    assert "out of range" in beyond["error"] and "【3†L9】" in odd["error"]

    text = "Read 【1†L1】 and 【2"
    body = json.dumps({"text": text}).encode()
    answer = await request(host.port, path, method="POST", body=body, headers=[as_alice])
    linked = answer.json()
    assert linked["text"] == "Read [The browser](corpus://toolhost/browser.md) and 【2"
    (found,) = linked["annotations"]
    assert linked["text"][found["start_index"] : found["end_index"]].startswith("[The browser]")
    assert linked["text"][linked["unfinished"] :] == "【2"

    assert (await request(host.port, asked, headers=[("authorization", f"Bearer {bob}")])).status == 404
    assert (await request(host.port, asked)).status == 401


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"text": 1}', b'{"text": "x", "more": 1}', b"\xff", b"nul", b'{"text": "a \\ud800"}', DEEP],
)
async def test_a_body_that_cannot_be_read_is_a_400_that_shows_what_to_send(host: Host, body: bytes) -> None:
    answer = await request(host.port, "/v1/sessions/a/citations", method="POST", body=body)
    assert answer.status == 400
    assert '{"text"' in answer.json()["error"]["message"]


async def test_no_citation_an_unknown_kind_and_an_oversized_text_are_refused(host: Host) -> None:
    assert (await request(host.port, "/v1/sessions/a/citations")).status == 400
    assert (await request(host.port, "/v1/sessions/odd/a/citations?citation=x")).status == 404
    body = json.dumps({"text": "x" * (1 << 20)}).encode()
    assert (await request(host.port, "/v1/sessions/a/citations", method="POST", body=body)).status == 413


async def test_a_call_cancelled_while_it_commits_has_happened_and_the_next_waits_for_it() -> None:
    session = BrowserSession({})
    committing, go_on = asyncio.Event(), asyncio.Event()
    commits: list[Set[str]] = []

    async def slow() -> None:
        committing.set()
        await go_on.wait()
        commits.append(session.changes().keys())

    at = cast("Callable[[BrowserState], Browser]", Pushing)
    first = asyncio.create_task(session.call(at, "search", {"query": "corpus"}, slow))
    await committing.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(session.call(at, "open", {"id": 0}, slow))
    go_on.set()
    assert await second == "1"
    assert commits == [{"e0", "p0"}, {"e1", "p1"}]


async def test_a_call_cancelled_while_pages_are_read_from_the_store_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = BrowserState()
    stored.push(Page("http://kept/", "kept", "text"))
    session = BrowserSession({name: part or b"" for name, part in stored.unsaved().items()})
    pushing = cast("Callable[[BrowserState], Browser]", Pushing)
    reading, go_on = threading.Event(), threading.Event()
    read = BrowserState.from_parts

    def slow(data: Mapping[str, bytes]) -> BrowserState:
        reading.set()
        go_on.wait(10)
        return read(data)

    async def save() -> None:
        return None

    with monkeypatch.context() as patched:
        patched.setattr(BrowserState, "from_parts", slow)
        first = asyncio.create_task(session.call(pushing, "one", {}, save))
        await asyncio.to_thread(reading.wait, 10)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go_on.set()
    assert await session.call(pushing, "two", {}, save) == "1"
