"""Fetching from a server that behaves badly, over loopback."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import resource
import socket
import time
import zlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web

from toolhost.browsing.errors import FetchError
from toolhost.browsing.fetch import Fetcher, FetchLimits
from toolhost.browsing.guard import Guard
from toolhost.search.base import Filters
from toolhost.search.retry import RetryPolicy, retry_after_seconds

ANY = Filters()


def fetcher_with(**limits: Any) -> Fetcher:
    guard = Guard(allow_networks=[ipaddress.ip_network("127.0.0.0/8")], ports=range(1, 65536))
    return Fetcher(guard, limits=FetchLimits(**{"seconds": 10, **limits}), retry=RetryPolicy(3, 0.01))


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    made = fetcher_with()
    yield made
    await made.aclose()


def failing(times: int, status: int, headers: dict[str, str] | None = None) -> Any:
    """A handler that fails some times, then answers."""
    left = [times]

    async def answer(_: web.Request) -> web.StreamResponse:
        if left[0]:
            left[0] -= 1
            return web.Response(status=status, headers=headers)
        return web.Response(text="at last")

    return answer


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_transient_status_is_retried(fetcher: Fetcher, site: Any, status: int) -> None:
    site.pages["/x"] = failing(2, status)
    assert (await fetcher.fetch(f"{site.base}/x", ANY)).body == b"at last"
    assert len(site.requests) == 3


async def test_after_the_last_try_the_status_is_told(fetcher: Fetcher, site: Any) -> None:
    site.pages["/x"] = failing(9, 503)
    with pytest.raises(FetchError, match=r"^HTTP 503 Service Unavailable$"):
        await fetcher.fetch(f"{site.base}/x", ANY)
    assert len(site.requests) == 3


async def test_retry_after_is_honoured(fetcher: Fetcher, site: Any) -> None:
    site.pages["/x"] = failing(1, 429, {"Retry-After": "1"})
    start = time.monotonic()
    assert (await fetcher.fetch(f"{site.base}/x", ANY)).body == b"at last"
    assert time.monotonic() - start >= 1


async def test_a_retry_after_past_the_deadline_is_not_waited_for(fetcher: Fetcher, site: Any) -> None:
    site.pages["/x"] = failing(1, 429, {"Retry-After": "3600"})
    with pytest.raises(FetchError, match="HTTP 429"):
        await asyncio.wait_for(fetcher.fetch(f"{site.base}/x", ANY), 5)
    assert len(site.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 451])
async def test_a_final_status_is_not_retried(fetcher: Fetcher, site: Any, status: int) -> None:
    site.pages["/x"] = failing(9, status)
    with pytest.raises(FetchError, match=f"HTTP {status}"):
        await fetcher.fetch(f"{site.base}/x", ANY)
    assert len(site.requests) == 1


async def test_a_refused_connection_is_a_text(fetcher: Fetcher) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(FetchError, match=r"cannot connect to 127\.0\.0\.1"):
        await fetcher.fetch(f"http://127.0.0.1:{port}/", ANY)


async def test_a_slow_body_ends_at_the_deadline(site: Any) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.05)

    site.pages["/slow"] = drip
    fetcher = fetcher_with(seconds=0.5)
    with pytest.raises(FetchError, match=r"no complete answer within 0\.5 seconds"):
        await asyncio.wait_for(fetcher.fetch(f"{site.base}/slow", ANY), 5)
    await fetcher.aclose()


async def test_redirects_are_followed_to_a_final_url(fetcher: Fetcher, site: Any) -> None:
    async def move(request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": "/deep/b?x=1"})

    site.pages["/a"] = move
    site.html("/deep/b", "<a href='c'>c</a>")
    assert (await fetcher.fetch(f"{site.base}/a", ANY)).url == f"{site.base}/deep/b?x=1"


async def test_relative_links_resolve_on_the_url_after_redirects(desk: Any, site: Any) -> None:
    async def move(request: web.Request) -> web.StreamResponse:
        return web.Response(status=301, headers={"Location": "/deep/b"})

    site.pages["/a"] = move
    site.html("/deep/b", "<a href='c'>c</a>")
    await desk.call("open", id=f"{site.base}/a")
    assert desk.state.page().links == (f"{site.base}/deep/c",)


async def test_a_redirect_loop_ends(fetcher: Fetcher, site: Any) -> None:
    async def around(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/a"})

    site.pages["/a"] = around
    with pytest.raises(FetchError, match="more than 8 redirects"):
        await fetcher.fetch(f"{site.base}/a", ANY)


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "javascript:alert(1)", "ftp://127.0.0.1/", "http://127.0.0.1:0/"]
)
async def test_a_redirect_to_what_is_not_permitted_is_refused(fetcher: Fetcher, site: Any, location: str) -> None:
    async def move(request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": location})

    site.pages["/a"] = move
    with pytest.raises(FetchError, match=r"can be opened|not permitted"):
        await fetcher.fetch(f"{site.base}/a", ANY)


async def test_a_body_is_capped(site: Any) -> None:
    url = site.bytes("/big", b"x" * 200_000, "text/plain")
    fetcher = fetcher_with(max_bytes=100_000)
    answer = await fetcher.fetch(url, ANY)
    assert len(answer.body) == 100_000 and answer.truncated
    await fetcher.aclose()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(b"hello" * 1000, mtime=0)),
        ("deflate", zlib.compress(b"hello" * 1000)),
        ("deflate", zlib.compress(b"hello" * 1000, wbits=-15)),
        ("identity", b"hello" * 1000),
    ],
)
async def test_content_codings(fetcher: Fetcher, site: Any, coding: str, body: bytes) -> None:
    url = site.bytes("/z", body, "text/plain", {"Content-Encoding": coding})
    assert (await fetcher.fetch(url, ANY)).body == b"hello" * 1000


@pytest.mark.parametrize(("coding", "body"), [("br", b"x"), ("gzip", b"not gzip at all")])
async def test_a_bad_content_coding_is_a_text(fetcher: Fetcher, site: Any, coding: str, body: bytes) -> None:
    url = site.bytes("/z", body, "text/plain", {"Content-Encoding": coding})
    with pytest.raises(FetchError):
        await fetcher.fetch(url, ANY)


async def test_a_bomb_of_half_a_gigabyte_is_capped_in_flat_memory(site: Any) -> None:
    compressor = zlib.compressobj(9, wbits=31)
    zeros = bytes(1024 * 1024)
    bomb = b"".join([*(compressor.compress(zeros) for _ in range(512)), compressor.flush()])
    assert len(bomb) < 600_000
    url = site.bytes("/bomb", bomb, "text/html", {"Content-Encoding": "gzip"})
    fetcher = fetcher_with(max_bytes=5_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = await fetcher.fetch(url, ANY)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(answer.body) == 5_000_000 and answer.truncated
    assert grown < 40_000, f"{grown} KiB"
    await fetcher.aclose()


async def test_a_validator_saves_the_body(fetcher: Fetcher, site: Any) -> None:
    sent: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == '"v1"':
            sent.append(304)
            return web.Response(status=304)
        sent.append(200)
        return web.Response(text="body", headers={"ETag": '"v1"'})

    site.pages["/e"] = answer
    bodies = [(await fetcher.fetch(f"{site.base}/e", ANY)).body for _ in range(3)]
    assert bodies == [b"body"] * 3 and sent == [200, 304, 304]


async def test_a_page_without_a_validator_is_read_again(fetcher: Fetcher, site: Any) -> None:
    url = site.html("/p", "one")
    await fetcher.fetch(url, ANY)
    site.html("/p", "two")
    assert b"two" in (await fetcher.fetch(url, ANY)).body


async def test_callers_at_once_share_a_request_and_one_leaving_does_not_end_it(fetcher: Fetcher, site: Any) -> None:
    arrived, go = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        arrived.set()
        await go.wait()
        return web.Response(text="shared")

    site.pages["/s"] = wait
    tasks = [asyncio.create_task(fetcher.fetch(f"{site.base}/s", ANY)) for _ in range(5)]
    await asyncio.wait_for(arrived.wait(), 5)
    tasks[0].cancel()
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert [result.body for result in results[1:]] == [b"shared"] * 4  # type: ignore[union-attr]
    assert len(site.requests) == 1


async def test_the_last_caller_leaving_ends_the_request(fetcher: Fetcher, site: Any) -> None:
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        arrived.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return web.Response(text="never")

    site.pages["/s"] = wait
    task = asyncio.create_task(fetcher.fetch(f"{site.base}/s", ANY))
    await asyncio.wait_for(arrived.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not fetcher._flights._running
    # Nothing of it is left in the way of the next one.
    site.pages["/s"] = failing(0, 200)
    assert (await fetcher.fetch(f"{site.base}/s", ANY)).body == b"at last"


async def test_no_credentials_cookies_or_proxy_of_the_environment(
    fetcher: Fetcher, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1/")

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text="x", headers={"Set-Cookie": "a=b"})

    site.pages["/c"] = answer
    url = site.base.replace("http://", "http://user:secret@") + "/c"
    for _ in range(2):
        assert (await fetcher.fetch(url, ANY)).url == f"{site.base}/c"
    for request in site.requests:
        assert "Cookie" not in request.headers and "Authorization" not in request.headers
        assert "secret" not in str(request.raw_headers)


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_an_answer_that_is_not_http_is_a_text(fetcher: Fetcher, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(FetchError):
            await fetcher.fetch(f"http://127.0.0.1:{port}/", ANY)


def test_retry_after_forms() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    seconds = retry_after_seconds(later)
    assert seconds is not None and 90 < seconds <= 100
    assert retry_after_seconds("7") == 7
    assert retry_after_seconds("9" * 400) == 86_400
    assert [retry_after_seconds(text) for text in (None, "", "soon", "-5", "1.5.2")] == [None] * 5
