"""`/mcp`, the server with everything, and the session's files as resources."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from mcp import Client, ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from tests.toolhost.conftest import Host
from tests.toolhost.test_render import outcome
from toolhost.errors import BadArguments
from toolhost.namespaces.resources import path_of


@asynccontextmanager
async def session(host: Host, path: str = "/mcp") -> AsyncIterator[ClientSession]:
    url = f"http://127.0.0.1:{host.port}{path}"
    async with streamable_http_client(url) as streams, ClientSession(streams[0], streams[1]) as client:
        yield client


async def test_every_tool_is_there_under_a_name_of_its_own(host: Host) -> None:
    async with session(host) as client:
        hello = await client.initialize()
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"python", "container_exec"} <= tools.keys()
        assert "cleanup_session" not in tools, "a model that is shown it would end its own session"
        for tool in tools.values():
            assert tool.title and tool.description
            assert tool.annotations is not None and tool.annotations.read_only_hint is not None
            assert tool.name in (hello.instructions or "")
        assert "not be shown to the user" not in (hello.instructions or "")


async def test_a_tool_of_a_namespace_answers_to_its_name_here(host: Host) -> None:
    host.manager.outcome = outcome(exit_code=0)
    async with session(host) as client:
        await client.initialize()
        result = await client.call_tool("container_exec", {"cmd": ["true"]})
        assert result.structured_content is not None and result.structured_content["exit_code"] == 0
        missing = await client.call_tool("exec", {"cmd": ["true"]})
        assert missing.is_error and "container_exec" in missing.content[0].model_dump()["text"]
        assert not (await client.call_tool("cleanup_session", {})).is_error


@pytest.mark.parametrize("path", ["/s/kept/mcp", "/s/kept/python/mcp"])
async def test_files_of_the_session_are_resources_once_there_is_one(host: Host, path: str) -> None:
    host.manager.contents = {"/mnt/data/a b.csv": b"x,y\n", "/mnt/data/p.png": b"\x89PNG"}
    async with session(host, path) as client:
        await client.initialize()
        assert (await client.list_resources()).resources == []
        await client.call_tool("python", {"code": "1"})
        listed = {resource.name: resource for resource in (await client.list_resources()).resources}
        assert listed.keys() == {"a b.csv", "p.png"}
        assert listed["a b.csv"].size == 4
        text = (await client.read_resource(listed["a b.csv"].uri)).contents[0].model_dump()
        assert text["text"] == "x,y\n" and text["mime_type"] == "text/csv"
        blob = (await client.read_resource(listed["p.png"].uri)).contents[0].model_dump()
        assert base64.b64decode(blob["blob"]) == b"\x89PNG"
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template.startswith("file:///mnt/data/")


async def test_files_of_another_session_are_not_there(host: Host) -> None:
    host.manager.contents = {"/mnt/data/a": b"secret"}
    async with session(host, "/s/mine/mcp") as client:
        await client.initialize()
        await client.call_tool("python", {"code": "1"})
    async with session(host, "/s/other/mcp") as client:
        await client.initialize()
        assert (await client.list_resources()).resources == []
        with pytest.raises(MCPError, match="no open session"):
            await client.read_resource("file:///mnt/data/a")


async def test_a_resource_that_is_not_there_is_an_error_with_its_uri(host: Host) -> None:
    async with session(host) as client:
        await client.initialize()
        await client.call_tool("python", {"code": "1"})
        with pytest.raises(MCPError, match="no such file") as refused:
            await client.read_resource("file:///mnt/data/nothing")
        assert refused.value.error.data == {"uri": "file:///mnt/data/nothing"}


@pytest.mark.parametrize(
    "uri", ["http://x/mnt/data/a", "file:///etc/passwd", "file://host/mnt/data/a", "file:///mnt/data/", "x", "file://["]
)
def test_no_other_uri_is_read(uri: str) -> None:
    if uri == "file:///mnt/data/":
        assert path_of(uri) == "/mnt/data/"  # the sandbox refuses to read a directory
        return
    with pytest.raises(BadArguments, match="resources/list"):
        path_of(uri)


async def test_resources_are_there_in_the_2026_protocol_too(host: Host) -> None:
    host.manager.contents = {"/mnt/data/a": b"1"}
    async with Client(f"http://127.0.0.1:{host.port}/s/kept/mcp", mode="2026-07-28") as client:
        await client.call_tool("python", {"code": "1"})
        (resource,) = (await client.list_resources()).resources
        assert (await client.read_resource(resource.uri)).contents[0].model_dump()["text"] == "1"
