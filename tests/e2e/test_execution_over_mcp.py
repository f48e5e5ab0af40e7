"""Execution as clients see it: texts, images, progress. `toolhost serve` as a process, on each backend."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import docker
import httpx
import psutil
import pytest
from mcp import ClientSession
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from tests.e2e.conftest import sandboxes
from tests.support.host import RunningHost
from tests.toolhost.rawclient import Stream

pytestmark = pytest.mark.timeout(180)

GROWTH_BYTES = 32 << 20
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 4])\nplt.title('growth')\nplt.show()\nprint('drawn')"

# name -> (code, whether `x` survives; None: either, and the text must be true)
HANGS = {
    "while True": ("while True: pass", True),
    "a blocked await": ("import asyncio\nawait asyncio.Event().wait()", True),
    "an ignored KeyboardInterrupt": (
        "while True:\n    try:\n        while True: pass\n    except KeyboardInterrupt: pass",
        None,
    ),
    "SIGINT ignored": ("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", False),
    "a C-level sleep": ("import ctypes\nwhile True: ctypes.CDLL(None).sleep(60)", True),
    "C code that never looks up": ("sum(range(10 ** 14))", False),
}
# name -> (code, what the text names)
DEATHS = {
    "a segfault": ("import ctypes\nctypes.string_at(0)", "signal 11 (SIGSEGV)"),
    "its own exit": ("import os\nos._exit(3)", "exited with code 3"),
    "kill -9 of itself": ("import os\nos.kill(os.getpid(), 9)", "signal 9 (SIGKILL)"),
}


@asynccontextmanager
async def connected(host: RunningHost, session: str = "a", **headers: str) -> AsyncIterator[Stream]:
    stream = await Stream.open(host.port, "/sse", [("x-session-id", session), *headers.items()])
    async with stream:
        await stream.initialize()
        yield stream


def agent(host: RunningHost) -> psutil.Process:
    """PID 1 of the one sandbox."""
    (found,) = sandboxes(host)
    if host.backend != "docker":
        return psutil.Process(int(found))
    with closing(docker.from_env()) as engine:
        return psutil.Process(engine.api.inspect_container(found)["State"]["Pid"])


async def timed(stream: Stream, code: str, said: str) -> float:
    """How long a call takes that says this, in seconds."""
    began = time.monotonic()
    assert await stream.python(code) == said
    return time.monotonic() - began


async def plain(stream: Stream) -> float:
    """What the plainest call takes here and now, in seconds: some 5 ms, where nothing else runs."""
    return max([await timed(stream, "0", "0") for _ in range(5)])


async def test_endless_printing_leaves_memory_flat_and_has_head_tail_and_count(host: RunningHost) -> None:
    assert host.process is not None
    async with connected(host) as stream:
        await stream.python("x = 1")
        processes = [psutil.Process(host.process.pid), agent(host)]
        before = [process.memory_info().rss for process in processes]
        text = await stream.python("while True: print('line')", meta={"toolhost/timeout": 10})
        after = [process.memory_info().rss for process in processes]
        took, plain_s = await timed(stream, "x", "1"), await plain(stream)
    assert text.startswith("line\nline\n")
    assert " characters cut; " in text
    assert "is in /mnt/data/.outputs/2.txt" in text
    assert "Timed out after 10 s: an interrupt ended it. Variables and files are kept." in text
    assert len(text) < 25_000
    for name, grown in zip(("host", "agent"), (b - a for a, b in zip(before, after, strict=True)), strict=True):
        assert grown < GROWTH_BYTES, (name, grown)
    assert took < max(1.0, 50 * plain_s)


@pytest.mark.parametrize("name", HANGS)
async def test_what_hangs_is_answered_in_time_and_the_text_is_true(host: RunningHost, name: str) -> None:
    code, survives = HANGS[name]
    async with connected(host) as stream:
        await stream.python("x = 41")
        began = time.monotonic()
        text = await stream.python(f"print('begun')\n{code}", meta={"toolhost/timeout": 1})
        took = time.monotonic() - began
        assert text.startswith("begun\n")
        assert "Timed out after 1 s" in text
        kept = "Variables and files are kept." in text
        lost = "Variables and imports are lost; files in /mnt/data are kept." in text
        assert kept != lost, text
        if survives is not None:
            assert kept == survives
        assert ("41" if kept else "NameError") in await stream.python("x")
        assert took < 5 + max(1.0, 50 * await plain(stream))  # 1 s, two steps of 2 s, and the way


@pytest.mark.parametrize("name", DEATHS)
async def test_a_death_is_named_in_the_text_and_files_are_kept(host: RunningHost, name: str) -> None:
    code, named = DEATHS[name]
    async with connected(host) as stream:
        await stream.python("open('/mnt/data/kept.txt', 'w').write('k')")
        text = await stream.python(code)
        assert named in text
        assert "Variables and imports are lost; files in /mnt/data are kept." in text
        took = await timed(stream, "open('/mnt/data/kept.txt').read()", "'k'")
        assert took < max(1.0, 50 * await plain(stream))


async def test_running_out_of_memory_is_named_in_the_text_with_the_limit(host: RunningHost) -> None:
    async with connected(host) as stream:
        await stream.python("open('/mnt/data/kept.txt', 'w').write('k')")
        text = await stream.python("hog = []\nwhile True: hog.append(b'x' * (16 << 20))")
        assert "out of memory (limit 1024 MiB)" in text or "The sandbox has 1024 MiB of memory" in text
        assert await stream.python("open('/mnt/data/kept.txt').read()") == "'k'"


async def test_a_figure_is_one_text_block_that_names_its_file_on_plain_sse(host: RunningHost) -> None:
    async with connected(host) as stream:
        result = await stream.tool("python", {"code": FIGURE})
        assert [block["type"] for block in result["content"]] == ["text"]
        text = result["content"][0]["text"]
        assert text.startswith("drawn\n"), text  # no notice of a cache that is being built, no warning
        (line,) = [line for line in text.splitlines() if line.startswith("[Image saved as ")]
        assert text.count("\n") == 1, text
        path = line.removeprefix("[Image saved as ").rstrip("]")
        assert await stream.python(f"open({path!r}, 'rb').read(8)") == repr(b"\x89PNG\r\n\x1a\n")


async def test_a_figure_is_an_image_for_a_client_of_sse_that_asks_for_rich_content(host: RunningHost) -> None:
    async with connected(host, **{"x-toolhost-content": "rich"}) as stream:
        result = await stream.tool("python", {"code": FIGURE})
        kinds = [block["type"] for block in result["content"]]
        assert kinds[:2] == ["text", "image"]
        assert result["content"][1]["mimeType"] == "image/png"
        assert base64.b64decode(result["content"][1]["data"]).startswith(b"\x89PNG")


@asynccontextmanager
async def official(host: RunningHost, transport: str) -> AsyncIterator[ClientSession]:
    """The SDK's own client."""
    if transport == "sse":
        async with (
            sse_client(f"{host.url}/sse", headers={"x-session-id": "official"}) as (read, write),
            ClientSession(read, write) as client,
        ):
            await client.initialize()
            yield client
        return
    async with (
        httpx.AsyncClient(headers={"x-session-id": "official"}, timeout=60) as web,
        streamable_http_client(f"{host.url}/mcp", http_client=web) as streams,
        ClientSession(streams[0], streams[1]) as client,
    ):
        await client.initialize()
        yield client


async def test_a_figure_is_an_image_over_streamable_http(host: RunningHost) -> None:
    async with official(host, "http") as client:
        result = await client.call_tool("python", {"code": FIGURE})
        blocks = [block.model_dump() for block in result.content]
        assert [block["type"] for block in blocks][:2] == ["text", "image"]
        assert base64.b64decode(blocks[1]["data"]).startswith(b"\x89PNG")


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_output_is_reported_while_code_runs_to_clients_that_ask(host: RunningHost, transport: str) -> None:
    messages: list[tuple[float, str]] = []
    first = asyncio.Event()

    async def progress(done: float, _total: float | None, message: str | None) -> None:
        messages.append((done, message or ""))
        first.set()

    async with official(host, transport) as client:
        code = "import time\nprint('first')\ntime.sleep(1.5)\nprint('last')"
        call = asyncio.create_task(client.call_tool("python", {"code": code}, progress_callback=progress))
        await asyncio.wait_for(first.wait(), 30)
        assert not call.done()
        assert messages[0][1].startswith("first")
        result = await call
        assert result.content[0].model_dump()["text"].startswith("first\nlast\n")
    assert "".join(message for _, message in messages) == "first\nlast\n"
    assert [done for done, _ in messages] == sorted({done for done, _ in messages})


async def test_no_progress_goes_to_a_client_that_did_not_ask(host: RunningHost) -> None:
    async with connected(host) as stream:
        ident = await stream.send("tools/call", {"name": "python", "arguments": {"code": "print('x')"}})
        message: dict[str, Any] = await stream.message()
        assert message.get("id") == ident, json.dumps(message)


async def test_what_was_cut_can_be_read_from_the_file_that_the_text_names(host: RunningHost, tmp_path: Path) -> None:
    async with connected(host) as stream:
        text = await stream.python("print('0123456789' * 15_000)")
        assert "130001 characters cut; all of it is in /mnt/data/.outputs/1.txt" in text
        assert await stream.python("len(open('/mnt/data/.outputs/1.txt').read())") == "150001"
