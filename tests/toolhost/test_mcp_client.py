"""The SDK's own client, over SSE."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mcp import ClientSession
from mcp.client.sse import sse_client

from tests.toolhost.conftest import Host


@asynccontextmanager
async def session(host: Host, **headers: str) -> AsyncIterator[ClientSession]:
    url = f"http://127.0.0.1:{host.port}/python/sse"
    async with sse_client(url, headers=headers) as (read, write), ClientSession(read, write) as client:
        await client.initialize()
        yield client


async def test_the_official_client_lists_runs_and_cleans_up(host: Host) -> None:
    async with session(host, **{"x-session-id": "a"}) as client:
        tools = await client.list_tools()
        assert [tool.name for tool in tools.tools] == ["python", "cleanup_session"]
        await client.call_tool("python", {"code": "x = 41"})
        result = await client.call_tool("python", {"code": "x + 1"})
        assert [block.model_dump()["text"] for block in result.content] == ["42"]
        assert not result.is_error
        assert result.structured_content is None
        await client.call_tool("cleanup_session", {})
    assert host.manager.sessions == {}


async def test_the_official_client_gets_texts_for_its_mistakes(host: Host) -> None:
    async with session(host) as client:
        for name, arguments in (("nope", {}), ("python", {}), ("python", {"code": 7})):
            result = await client.call_tool(name, arguments)
            assert result.is_error
            assert result.content[0].model_dump()["text"]
