"""HTTP to model servers: events in any pieces, connections used again, addresses that a proxy is named for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from toolhost.loop.errors import ModelError
from toolhost.loop.models import wire
from toolhost.loop.models.wire import Wire, _EventReader

EVENTS = (
    b": hello\ndata: one\n\ndata: two\r\ndata:  three\r\n\r\nevent: x\rdata:four\r\rid: 7\ndatabase: no\n\ndata: cut"
)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=8))
def test_events_are_the_same_in_whatever_pieces_they_come(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(EVENTS)]
    reader = _EventReader()
    pieces = [EVENTS[start:end] for start, end in itertools.pairwise(places)]
    assert [event for piece in pieces for event in reader.read(piece)] == [b"one", b"two\n three", b"four"]


def test_an_event_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_MAX_EVENT_BYTES", 1000)
    reader = _EventReader()
    with pytest.raises(ModelError, match="more than 1000 bytes"):
        for _ in range(100):
            list(reader.read(b"data: " + b"x" * 50))
    lines = _EventReader()
    with pytest.raises(ModelError, match="more than 1000 bytes"):
        for _ in range(100):
            list(lines.read(b"data: " + b"x" * 50 + b"\n"))


Serve = Callable[..., Awaitable[TestServer]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers that are closed after the test, however it ends."""
    async with AsyncExitStack() as stack:

        async def start(handler: Any, method: str = "POST", path: str = "/v1/x") -> TestServer:
            app = web.Application()
            app.router.add_route(method, path, handler)
            return await stack.enter_async_context(TestServer(app, host="127.0.0.1"))

        yield start


async def test_a_connection_is_used_again_after_the_end_of_a_stream(serve: Serve) -> None:
    connections: set[Any] = set()

    async def stream(request: web.Request) -> web.StreamResponse:
        connections.add(request.transport)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\ndata: [DONE]\n\n')
        return response

    server = await serve(stream)
    client = Wire(str(server.make_url("/v1")), {}, 10)
    for _ in range(5):
        assert [event async for event in client.events("/x", {})] == [{"n": 1}]
    await client.aclose()
    assert len(connections) == 1


async def test_nothing_is_waited_for_after_the_last_event(serve: Serve) -> None:
    over = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"type": "a"}\n\ndata: {"type": "end"}\n\ndata: {"type": "a"}\n\n')
        await over.wait()
        return response

    server = await serve(stream)
    client = Wire(str(server.make_url("/v1")), {}, 600)
    async with asyncio.timeout(60):
        assert [event["type"] async for event in client.events("/x", {}, {"end"})] == ["a", "end"]
    over.set()
    await client.aclose()


async def test_what_is_no_stream_and_what_is_no_json_are_errors_that_say_so(serve: Serve) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "chat.completion"})

    server = await serve(answer)
    client = Wire(str(server.make_url("/v1")), {}, 10)
    with pytest.raises(ModelError, match="streams application/json, not text/event-stream"):
        await anext(client.events("/x", {}))
    with pytest.raises(ModelError, match="cannot be written as JSON") as caught:
        await client.json("/x", {"temperature": float("inf")})
    assert caught.value.code == "invalid_prompt"
    await client.aclose()


async def test_a_server_that_says_nothing_is_given_up_after_the_timeout(serve: Serve) -> None:
    over = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await over.wait()
        return web.json_response({})

    server = await serve(wait)
    client = Wire(str(server.make_url("/v1")), {}, 0.2)
    with pytest.raises(ModelError, match="did not answer in time"):
        await client.json("/x", {})
    over.set()
    await client.aclose()


async def test_the_environment_s_proxy_is_used_but_not_for_what_it_excludes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def proxy(request: web.Request) -> web.StreamResponse:
        asked.append(request.raw_path)
        return web.json_response({"by": "proxy"})

    server = await serve(proxy, "*", "/{tail:.*}")
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", str(server.make_url("/")))
    client = Wire("http://model.test/v1", {}, 10)
    assert await client.json("/x", {}) == {"by": "proxy"}
    await client.aclose()
    assert asked == ["http://model.test/v1/x"]
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    direct = Wire(str(server.make_url("/v1")), {}, 10)
    assert await direct.json("/x", {}) == {"by": "proxy"}
    await direct.aclose()
    assert asked[1] == "/v1/x"


async def test_a_kept_connection_that_the_server_closes_when_it_is_used_costs_nothing() -> None:
    requests: list[int] = []
    closed = False

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal closed
        for number in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            requests.append(number)
            if number == 1:
                closed = True
                break
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        client = Wire(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", {}, 10)
        assert [await client.json("/x", {}) for _ in range(2)] == [{}, {}]
        assert closed
        assert requests == [0, 1, 0]
        await client.aclose()


async def test_a_server_that_always_hangs_up_is_an_error() -> None:
    calls = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        client = Wire(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", {}, 10)
        with pytest.raises(ModelError, match="the connection to the model server"):
            await client.json("/x", {})
        assert calls == 3
        await client.aclose()
