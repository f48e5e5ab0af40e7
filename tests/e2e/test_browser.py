"""The browser from outside: a host as its users have it, no key, no network, the project's own documentation."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.e2e.conftest import sandboxes
from tests.support.host import RunningHost
from tests.toolhost.rawclient import Stream

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(180)]

QUERY = "zebra folders of the corpus"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RunningHost]:
    """On one backend: browsing uses none."""
    running = RunningHost(tmp_path / "state", backend="bubblewrap").start()
    yield running
    running.purge()
    assert sandboxes(running) == []


async def connect(host: RunningHost, session: str, *headers: tuple[str, str]) -> Stream:
    stream = await Stream.open(host.port, "/browser/sse", [("x-session-id", session), *headers])
    await stream.initialize()
    return stream


async def browse(host: RunningHost, session: str, tool: str, *headers: tuple[str, str], **arguments: Any) -> str:
    """One call over a connection of its own; the text."""
    async with await connect(host, session, *headers) as stream:
        result = await stream.tool(tool, arguments)
        assert [block["type"] for block in result["content"]] == ["text"]
        assert "structuredContent" not in result
        return str(result["content"][0]["text"])


async def citation(host: RunningHost, session: str, text: str) -> dict[str, Any]:
    path = f"/v1/sessions/{session}/citations?citation={quote(text)}"
    (found,) = (await asyncio.to_thread(host.get_json, path))["citations"]
    assert isinstance(found, dict)
    return found


async def test_search_open_find_and_cite_and_all_of_it_outlives_a_killed_host(host: RunningHost) -> None:
    searched = await browse(host, "a", "search", query=QUERY)
    assert searched.startswith(f"[0] {QUERY}\n")
    opened = await browse(host, "a", "open", id=0, num_lines=5)
    assert opened.startswith("[1] The browser (corpus://toolhost/browser.md)\n")
    before = await citation(host, "a", "【1†L0-L9】")

    await asyncio.to_thread(host.restart)
    assert await citation(host, "a", "【1†L0-L9】") == before
    assert before["url"] == "corpus://toolhost/browser.md"
    assert "URL: corpus://toolhost/browser.md" in before["lines"]
    again = await browse(host, "a", "open", cursor=1, num_lines=5, loc=int(opened.split("[", 2)[2].split(" ")[0]))
    assert again == opened.replace("[1]", "[2]", 1)
    assert (await browse(host, "a", "find", pattern="corpus", cursor=1)).startswith(
        "[3] Find results for text: `corpus`"
    )
    assert (await browse(host, "a", "open", cursor=0, id=0)).startswith("[4] The browser")


async def test_two_sessions_do_not_share_pages_and_browsing_starts_no_sandbox(host: RunningHost) -> None:
    await browse(host, "a", "search", query=QUERY)
    assert await browse(host, "b", "open", cursor=0) == "No pages to access!"
    for session in ("b", "never"):
        status, _ = await asyncio.to_thread(host.get, f"/v1/sessions/{session}/citations?citation={quote('【0†L1】')}")
        assert status == 404
    assert sandboxes(host) == []


async def test_the_running_host_sees_what_the_corpus_command_adds_and_removes(
    host: RunningHost, tmp_path: Path
) -> None:
    folder = tmp_path / "handbook"
    folder.mkdir()
    (folder / "holidays.md").write_text("# Holidays\n\nThe quokka policy: thirty days.\n")
    assert "handbook" not in await browse(host, "a", "search", query="quokka")
    await asyncio.to_thread(corpus, host, "add", str(folder))
    assert "†Holidays†handbook】" in await browse(host, "a", "search", query="quokka")
    assert "thirty days" in await browse(host, "a", "open", id=0)
    await asyncio.to_thread(corpus, host, "remove", "handbook")
    assert "handbook" not in await browse(host, "a", "search", query="quokka")
    assert "thirty days" in await browse(host, "a", "open", cursor=2), "what was shown stays"


def corpus(host: RunningHost, *arguments: str) -> None:
    command = [sys.executable, "-m", "toolhost", "corpus", *arguments, "--state-dir", str(host.state_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


async def test_calls_at_once_take_turns_and_every_one_has_a_cursor_of_its_own(host: RunningHost) -> None:
    streams = [await connect(host, "a") for _ in range(4)]
    results = await asyncio.gather(*(stream.tool("search", {"query": QUERY}) for stream in streams))
    cursors = sorted(result["content"][0]["text"].split("]")[0] for result in results)
    assert cursors == ["[0", "[1", "[2", "[3"]
    for stream in streams:
        stream.close()
    await asyncio.to_thread(host.restart)
    assert (await browse(host, "a", "open", cursor=3)).startswith(f"[4] {QUERY}")


async def test_clean_up_ends_a_responses_pages(host: RunningHost) -> None:
    async with await connect(host, "resp_0b") as stream:
        await stream.tool("search", {"query": QUERY})
        for _ in range(2):
            assert (await stream.tool("cleanup_session"))["isError"] is False
    assert await browse(host, "resp_0b", "open") == "No pages to access!"


async def test_calls_are_logged_without_queries_addresses_and_texts(host: RunningHost) -> None:
    await browse(host, "a", "search", query=QUERY)
    await browse(host, "a", "open", id="http://127.0.0.1/zebra")
    lines = [json.loads(line) for line in host.log_text().splitlines() if line.startswith("{")]
    calls = [line for line in lines if line["event"] == "call"]
    assert [(line["namespace"], line["tool"], line["error"]) for line in calls] == [
        ("browser", "search", None),
        ("browser", "open", "browser_error"),
    ]
    assert "zebra" not in host.log_text()
