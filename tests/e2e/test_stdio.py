"""`toolhost stdio` with the SDK's own client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(120)]


def left(state_dir: Path) -> list[Path]:
    return list(state_dir.glob("stdio/*/bubblewrap/sandboxes/*/owner.json"))


async def test_a_desktop_client_has_one_session_for_each_process(tmp_path: Path) -> None:
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "toolhost", "stdio", "--state-dir", str(tmp_path)], env=dict(os.environ)
    )
    async with (
        stdio_client(command) as one,
        ClientSession(*one) as first,
        stdio_client(command) as two,
        ClientSession(*two) as second,
    ):
        await first.initialize()
        await second.initialize()
        await first.call_tool("python", {"code": "x = 41"})
        result = await first.call_tool("python", {"code": "x + 1"})
        assert result.content[0].model_dump()["text"] == "42"
        result = await second.call_tool("python", {"code": "x"})
        assert "NameError" in result.content[0].model_dump()["text"]
    assert left(tmp_path) == []


async def test_lines_that_are_no_requests_are_answered_with_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolhost", "stdio", "--state-dir", str(tmp_path)]
    call = {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "python", "arguments": {"code": "1"}}}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    half = json.dumps({**call, "id": 7, "params": {"name": "python", "arguments": {"code": "\ud800"}}})
    for line, ident, code in (
        ('{"jsonrpc"', None, -32700),
        ("[]", None, -32600),
        (json.dumps({**call, "id": 1.5}), None, -32600),
        (json.dumps({**call, "id": None}), None, -32600),
        (half, 7, -32700),  # JavaScript sends such halves of a character
        (json.dumps({**call, "id": "a", "params": []}), "a", -32600),
        (json.dumps({"id": 8}), 8, -32600),
    ):
        process.stdin.write(line.encode() + b"\n")
        answer = json.loads(await process.stdout.readline())
        assert (answer["id"], answer["error"]["code"]) == (ident, code), line
        assert "Nothing ran." in answer["error"]["message"]
        assert ("half of a surrogate pair" in answer["error"]["message"]) == (line is half)
    process.stdin.close()
    assert await process.wait() == 0


async def test_a_desktop_client_has_every_tool_and_the_files_of_its_session(tmp_path: Path) -> None:
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "toolhost", "stdio", "--state-dir", str(tmp_path)], env=dict(os.environ)
    )
    async with stdio_client(command) as streams, ClientSession(*streams) as client:
        hello = await client.initialize()
        assert hello.server_info.name == "toolhost"
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert {"python", "container_exec"} <= names and "cleanup_session" not in names
        await client.call_tool("container_exec", {"cmd": "echo from shell > made.txt"})
        result = await client.call_tool("python", {"code": "print(open('made.txt').read())"})
        assert "from shell" in result.content[0].model_dump()["text"]
        (resource,) = (await client.list_resources()).resources
        assert (await client.read_resource(resource.uri)).contents[0].model_dump()["text"] == "from shell\n"
