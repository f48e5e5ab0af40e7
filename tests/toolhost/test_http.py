"""Streamable HTTP: the SDK's client of both protocol generations, and raw requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from mcp import Client, ClientSession
from mcp.client.streamable_http import streamable_http_client

from sandboxes.spec import ImageRef
from tests.toolhost.conftest import Host, StartHost
from tests.toolhost.rawclient import Answer, request
from tests.toolhost.test_render import outcome
from toolhost.auth import Scope, mint

ACCEPT = [("Accept", "application/json, text/event-stream"), ("Content-Type", "application/json")]
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "0"}}


@asynccontextmanager
async def session(host: Host, path: str = "/mcp", **headers: str) -> AsyncIterator[ClientSession]:
    url = f"http://127.0.0.1:{host.port}{path}"
    async with (
        httpx2.AsyncClient(headers=headers, timeout=30) as http,
        streamable_http_client(url, http_client=http) as streams,
        ClientSession(streams[0], streams[1]) as client,
    ):
        await client.initialize()
        yield client


async def text_of(client: Any, code: str) -> str:
    result = await client.call_tool("python", {"code": code})
    return str(result.content[0].text)


async def test_the_mcp_session_is_the_session_and_ends_with_it(host: Host) -> None:
    async with session(host) as client:
        tools = await client.list_tools()
        assert "python" in [tool.name for tool in tools.tools]
        await text_of(client, "x = 41")
        assert await text_of(client, "x + 1") == "42"
        (key,) = host.manager.sessions
    await host.manager.until(f"gone {key}")
    assert host.manager.sessions == {}


@pytest.mark.parametrize(("path", "name"), [("/mcp", "toolhost"), ("/python/mcp", "python"), ("/s/k/mcp", "toolhost")])
async def test_every_endpoint_says_whose_it_is(host: Host, path: str, name: str) -> None:
    answer = await post(host, {"id": 1, "method": "initialize", "params": HELLO}, path=path)
    assert event(answer)["result"]["serverInfo"]["name"] == name
    assert answer.header("mcp-session-id")


async def test_a_header_or_the_url_names_the_session_across_mcp_sessions(host: Host) -> None:
    async with session(host, **{"x-toolhost-session": "kept"}) as client:
        await text_of(client, "x = 1")
    async with session(host, "/s/kept/python/mcp") as client:
        assert await text_of(client, "x") == "1"
    async with session(host, **{"x-session-id": "resp_0a"}) as client:
        assert "NameError" in await text_of(client, "x")


@pytest.mark.parametrize("path", ["/mcp", "/python/mcp"])
async def test_the_2026_protocol_finds_its_session_by_url_or_else_has_one_for_each_request(
    host: Host, path: str
) -> None:
    base = f"http://127.0.0.1:{host.port}"
    async with Client(f"{base}/s/kept{path}", mode="2026-07-28") as client:
        await text_of(client, "x = 1")
        assert await text_of(client, "x") == "1"
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert (tools["python"].meta or {})["include_in_prompt"] is False
    async with Client(f"{base}{path}", mode="2026-07-28") as client:
        await text_of(client, "x = 2")
        assert "NameError" in await text_of(client, "x")
    assert [key.id for key in host.manager.sessions] == ["kept"]


async def test_images_links_and_the_receipt_follow_the_text(host: Host) -> None:
    host.manager.outcome = outcome(value="1", images=(ImageRef("/mnt/data/f.png", "image/png"),))
    host.manager.contents["/mnt/data/f.png"] = b"png"
    async with session(host) as client:
        result = await client.call_tool("python", {"code": "plot()"})
    assert [block.type for block in result.content] == ["text", "image"]
    assert result.structured_content is not None
    assert result.structured_content["receipt"]["sequence"] == 2


async def test_mistakes_are_texts_here_too(host: Host) -> None:
    async with session(host) as client:
        for name, arguments in (("nope", {}), ("python", {}), ("python", {"code": 7})):
            result = await client.call_tool(name, arguments)
            assert result.is_error
    async with session(host, **{"x-session-id": "not ok"}) as client:
        assert "not valid" in await text_of(client, "1")


async def test_another_s_mcp_session_is_404(start_host: StartHost, tmp_path: Any) -> None:
    tokens = dict(mint(name, [Scope.USE]) for name in ("alice", "bob"))
    file = tmp_path / "tokens"
    file.write_text("\n".join(tokens.values()))
    host = await start_host(auth={"tokens_file": str(file)})
    alice, bob = ([("Authorization", f"Bearer {token}")] for token in tokens)
    assert (await post(host, {"id": 1, "method": "initialize", "params": HELLO})).status == 401
    opened = await post(host, {"id": 1, "method": "initialize", "params": HELLO}, headers=alice)
    theirs = [("Mcp-Session-Id", opened.header("mcp-session-id") or "")]
    call = {"id": 2, "method": "tools/call", "params": {"name": "python", "arguments": {"code": "1"}}}
    assert (await post(host, call, headers=[*bob, *theirs])).status == 404
    assert host.manager.executions == []
    assert event(await post(host, call, headers=[*alice, *theirs]))["result"]["content"][0]["text"] == "1"


async def test_a_client_may_go_on_before_the_answer_to_initialize_has_ended(host: Host) -> None:
    statuses: list[int] = []
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}).encode()

    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            named = [(key.decode(), value.decode()) for key, value in message["headers"] if key == b"mcp-session-id"]
            ready = await post(host, {"method": "notifications/initialized"}, headers=named)
            statuses.append(ready.status)

    headers = [(name.lower().encode(), value.encode()) for name, value in [*ACCEPT, ("Host", "localhost")]]
    scope = {"type": "http", "method": "POST", "path": "/mcp", "headers": headers, "query_string": b"", "client": None}
    await host.app(scope, receive, send)
    assert statuses == [202]


async def test_an_unknown_mcp_session_or_namespace_is_404(host: Host) -> None:
    listing = {"id": 1, "method": "tools/list"}
    assert (await post(host, listing, headers=[("Mcp-Session-Id", "0" * 32)])).status == 404
    assert (await post(host, listing, path="/nothing/mcp")).status == 404


@pytest.mark.parametrize("ident", [None, 1.5, True, [1], {"a": 1}])
async def test_a_request_whose_id_is_none_is_answered_and_a_notification_is_taken(host: Host, ident: Any) -> None:
    opened = await post(host, {"id": 1, "method": "initialize", "params": HELLO})
    named = [("Mcp-Session-Id", opened.header("mcp-session-id") or "")]
    assert (await post(host, {"method": "notifications/initialized"}, headers=named)).status == 202
    call = {"method": "tools/call", "params": {"name": "python", "arguments": {"code": "1"}}}
    answer = await post(host, {**call, "id": ident}, headers=named)
    assert (answer.status, answer.json()["id"]) == (400, None)
    assert answer.json()["error"] == {"code": -32600, "message": "The id must be a string or an integer. Nothing ran."}
    assert host.manager.executions == []


async def test_who_opens_too_many_mcp_sessions_loses_its_own(
    start_host: StartHost, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolhost.transport.http.REMEMBERED", 4)
    tokens = dict(mint(name, [Scope.USE]) for name in ("alice", "mallory"))
    file = tmp_path / "tokens"
    file.write_text("\n".join(tokens.values()))
    host = await start_host(auth={"tokens_file": str(file)})
    alice, mallory = ([("Authorization", f"Bearer {token}")] for token in tokens)

    async def opened(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        answer = await post(host, {"id": 1, "method": "initialize", "params": HELLO}, headers=headers)
        return [*headers, ("Mcp-Session-Id", answer.header("mcp-session-id") or "")]

    listing = {"id": 2, "method": "tools/list"}
    hers = await opened(alice)
    many = [await opened(mallory) for _ in range(10)]
    assert [(await post(host, listing, headers=one)).status for one in many] == [404] * 7 + [200] * 3
    assert (await post(host, listing, headers=hers)).status == 200
    managers = host.app.http._managers.values()
    assert sum(len(manager._server_instances) for manager in managers) == 4, "the SDK's own sessions end too"


async def test_an_open_stream_does_not_keep_the_host_from_stopping(host: Host) -> None:
    async with session(host) as client:
        await client.list_tools()
        await host.app.close()
    assert (await post(host, {"id": 1, "method": "initialize", "params": HELLO})).status == 503


async def post(
    host: Host, message: dict[str, Any], path: str = "/mcp", headers: list[tuple[str, str]] | None = None
) -> Answer:
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    return await request(host.port, path, method="POST", body=body, headers=[*ACCEPT, *(headers or [])])


def event(answer: Answer) -> Any:
    assert answer.status == 200, answer
    (data,) = [line for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    return json.loads(data.removeprefix("data: "))
