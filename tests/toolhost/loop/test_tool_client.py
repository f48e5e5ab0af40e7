"""Our client of tool servers: its shape, its headers, and what it does when a server goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.toolhost.loop.mcp_double import ATTEMPT, Double, Host, serving
from toolhost.loop.errors import RequestError, ToolServerGone
from toolhost.loop.tool_client import Endpoint, McpToolServer
from toolhost.loop.tools import AttemptSession


@pytest.mark.parametrize(
    ("text", "url", "transport"),
    [
        ("toolhost:8000/python", "http://toolhost:8000/python/sse", "sse"),
        ("toolhost:8000", "http://toolhost:8000/sse", "sse"),
        ("user:token@toolhost:8000/python", "http://user:token@toolhost:8000/python/sse", "sse"),
        ("http://toolhost:8000/mcp", "http://toolhost:8000/mcp", "http"),
        ("https://example.org/python/sse", "https://example.org/python/sse", "sse"),
    ],
)
def test_endpoints_are_written_as_for_vllm_or_as_urls(text: str, url: str, transport: str) -> None:
    endpoint = Endpoint.parse(text)
    assert (endpoint.url, endpoint.transport) == (url, transport)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://toolhost/python",
        "/python",
        "my host/python",
        "toolhost:99999/python",
        "[::1",
        "http://[",
        "http://]/mcp",
        "a[b/python",
    ],
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not HOST:PORT/namespace"):
        Endpoint.parse(text)


async def test_namespaces_are_named_by_their_servers_and_hidden_tools_stay_hidden(tool_server: McpToolServer) -> None:
    assert tool_server.namespaces == ["python", "browser", "container", "files"]
    assert tool_server.has_tool("python")
    assert not tool_server.has_tool("other")
    python = tool_server.get_tool_description("python")
    assert python is not None
    assert (python.description, python.tools) == ("The python tool.", [])
    browser = tool_server.get_tool_description("browser", ["open"])
    assert browser is not None
    assert [tool.name for tool in browser.tools] == ["open"]
    assert tool_server.get_tool_description("browser", ["other"]) is None
    files = tool_server.get_tool_description("files")
    assert files is not None
    assert [(tool.name, tool.read_only) for tool in files.tools] == [("read", True), ("write", False)]


async def test_listing_opens_no_session_and_a_session_carries_its_key(
    tool_server: McpToolServer, double: Double
) -> None:
    assert double.host.headers == []
    async with tool_server.new_session("python", "resp_1", {"x-toolhost-session": "kept"}) as session:
        assert session._client_info.name
        assert isinstance(session, AttemptSession)
        await session.call_tool("python", {"code": "x = 20"})
        result = await session.call_tool("python", {"code": "print(x + 1)"})
    assert result.content[0].text == "21\n"
    assert {headers["x-session-id"] for headers in double.host.headers} == {"resp_1"}
    assert {headers["x-toolhost-session"] for headers in double.host.headers} == {"kept"}


async def test_sessions_of_two_tasks_do_not_meet(tool_server: McpToolServer) -> None:
    async with (
        tool_server.new_session("python", "resp_1") as one,
        tool_server.new_session("python", "resp_2") as two,
    ):
        await one.call_tool("python", {"code": "x = 1"})
        await two.call_tool("python", {"code": "x = 2"})
        assert (await one.call_tool("python", {"code": "print(x)"})).content[0].text == "1\n"


async def test_the_same_attempt_is_joined_and_another_runs(tool_server: McpToolServer, double: Double) -> None:
    async with tool_server.new_session("files", "resp_1") as session:
        await session.call_attempt("write", {"n": 1}, "att_1")
        await session.call_attempt("write", {"n": 1}, "att_1")
        await session.call_attempt("write", {"n": 1}, "att_2")
    assert len(double.host.runs) == 2
    assert ATTEMPT not in str(double.host.runs)


async def test_a_session_outlives_its_server_and_keeps_its_key(tool_server: McpToolServer, double: Double) -> None:
    async with tool_server.new_session("python", "resp_1") as session:
        await session.call_tool("python", {"code": "x = 5"})
        await double.kill()
        await double.start()
        assert (await session.call_tool("python", {"code": "print(x)"})).content[0].text == "5\n"


async def test_a_quiet_connection_is_given_up_before_a_server_on_uvicorn_does(
    tool_server: McpToolServer, double: Double
) -> None:
    async with tool_server.new_session("python", "resp_1") as session:
        for pause_s in (0.0, 0.0, 3.5):
            await asyncio.sleep(pause_s)
            await session.call_attempt("python", {"code": "1"}, None)
    *_, first, second, third = double.host.posted_from
    assert first == second != third


async def test_a_server_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ToolServerGone, match=r"cannot connect to http://127\.0\.0\.1:9/python/sse"):
        await McpToolServer.connect(["user:secret@127.0.0.1:9/python"])
    with pytest.raises(ToolServerGone) as caught:
        await McpToolServer.connect(["user:secret@127.0.0.1:9/python"])
    assert "secret" not in str(caught.value)


async def test_cleanup_of_a_server_that_keeps_nothing_costs_no_call() -> None:
    async with serving(Host(keeps_sessions=False)) as double:
        server = await McpToolServer.connect([double.at("python")])
        async with server.new_session("python", "resp_1") as session:
            result = await session.call_tool("cleanup_session", {})
    assert "keeps no session" in result.content[0].text
    assert double.host.cleaned == []


async def test_cancelling_a_call_tells_the_server(tool_server: McpToolServer, double: Double) -> None:
    async with tool_server.new_session("python", "resp_1") as session:
        call = asyncio.create_task(session.call_tool("python", {"code": "hold()"}))
        await double.host.started.wait()
        call.cancel()
        async with asyncio.timeout(10):
            await double.host.was_cancelled.wait()


async def test_a_session_over_http_outlives_a_server_that_has_forgotten_it(
    tool_server: McpToolServer, double: Double
) -> None:
    """The new server answers 404 with an error of its own wording: it took nothing, so the call is asked again."""
    async with tool_server.new_session("files", "resp_1") as session:
        await session.call_tool("write", {"n": 1})
        await double.kill()
        await double.start()
        assert (await session.call_tool("write", {"n": 2})).content[0].text == '{"write": {"n": 2}}'
    assert [args for _, _, args in double.host.runs] == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("where", ["python", "files"])
async def test_a_result_of_ten_megabytes_arrives_whole_and_once(where: str, double: Double) -> None:
    over_http = where == "files"
    server = await McpToolServer.connect([f"http://{double.at(where)}/mcp" if over_http else double.at(where)])
    async with server.new_session(where, "resp_1") as session:
        if over_http:
            result = await session.call_attempt("read", {"repeat": 10_000_000}, "att_1")
        else:
            result = await session.call_attempt("python", {"code": "print('y' * 10_000_000)"}, "att_1")
    assert len(result.content[0].text) > 10_000_000
    assert len(double.host.runs) == 1


@asynccontextmanager
async def answering(
    first: str, status: int = 202, headers: dict[str, str] | None = None
) -> AsyncIterator[tuple[str, list[int]]]:
    """A server whose SSE stream begins with `first`, or is a redirect, and that answers each POST with a status."""
    posts: list[int] = []

    async def stream(_: Request) -> Response:
        if headers:
            return Response(status_code=307, headers=headers)

        async def events() -> AsyncIterator[str]:
            yield first
            await asyncio.sleep(60)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def post(_: Request) -> Response:
        posts.append(status)
        return Response(status_code=status)

    app = Starlette(routes=[Route("/python/sse", stream), Route("/post", post, methods=["POST"])])
    async with served(app) as address:
        yield address, posts


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    server, socket = uvicorn.Server(config), config.bind_socket()
    task = asyncio.create_task(server.serve([socket]))
    try:
        yield f"127.0.0.1:{socket.getsockname()[1]}/python"
    finally:
        server.should_exit = server.force_exit = True
        await task
        socket.close()


@pytest.mark.parametrize(
    ("first", "status", "headers", "said", "asked"),
    [
        ("event: endpoint\ndata: /post\n\n", 401, None, "answered 401", 1),
        ("event: endpoint\ndata: /post\n\n", 500, None, "answered 500", 1),
        ("event: endpoint\ndata: http://127.0.0.1:9/post\n\n", 202, None, "another origin", 0),
        ("", 202, {"location": "/elsewhere"}, "redirects to '/elsewhere'", 0),
    ],
    ids=["refused", "failing", "another origin", "redirect"],
)
async def test_a_server_that_takes_no_messages_is_a_clear_error_at_once(
    first: str, status: int, headers: dict[str, str] | None, said: str, asked: int
) -> None:
    async with answering(first, status, headers) as (address, posts):
        with pytest.raises(ToolServerGone, match=said):
            await McpToolServer.connect([address])
    assert len(posts) == asked


@asynccontextmanager
async def leaving(cut: bool) -> AsyncIterator[str]:
    """A server that takes a call and then ends its stream without an answer, cleanly or cut off in the middle."""
    outboxes: list[asyncio.Queue[dict[str, Any] | None]] = []

    async def stream(_: Request) -> Response:
        outbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        number = len(outboxes)
        outboxes.append(outbox)

        async def events() -> AsyncIterator[str]:
            yield f"event: endpoint\ndata: /post/{number}\n\n"
            while (message := await outbox.get()) is not None:
                yield f"event: message\ndata: {json.dumps(message)}\n\n"
            if cut:
                raise ConnectionAbortedError("scripted break")

        return StreamingResponse(events(), media_type="text/event-stream")

    async def post(request: Request) -> Response:
        message = await request.json()
        outbox = outboxes[request.path_params["number"]]
        result: dict[str, Any] = {"tools": [{"name": "python", "inputSchema": {"type": "object"}}]}
        if message["method"] == "initialize":
            server = {"name": "python", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}
        if message["method"] == "tools/call":
            # After this POST is answered: the call was taken, and only the stream can tell what becomes of it.
            asyncio.get_running_loop().call_later(0.1, outbox.put_nowait, None)
        elif "id" in message:
            outbox.put_nowait({"jsonrpc": "2.0", "id": message["id"], "result": result})
        return Response(status_code=202)

    app = Starlette(routes=[Route("/python/sse", stream), Route("/post/{number:int}", post, methods=["POST"])])
    async with served(app) as address:
        yield address


@pytest.mark.parametrize("cut", [False, True], ids=["ended", "cut"])
async def test_a_stream_that_ends_in_mid_call_is_a_lost_call_at_once(cut: bool) -> None:
    async with leaving(cut) as address:
        server = await McpToolServer.connect([address])
        async with server.new_session("python", "resp_1") as session:
            async with asyncio.timeout(60):  # the call itself would wait for longer
                with pytest.raises(ToolServerGone):
                    await session.call_attempt("python", {"code": "1"}, "att_1")
