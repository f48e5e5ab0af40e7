"""Clients that run on Node: both lines of the TypeScript SDK, and the Inspector's command line."""

from __future__ import annotations

import json

import pytest

from tests.clients.drive import drive, run
from tests.clients.environments import ENVIRONMENTS
from tests.support.host import RunningHost

pytestmark = [pytest.mark.clients, pytest.mark.bubblewrap]


@pytest.mark.parametrize(
    ("which", "path", "name", "tools"),
    [
        ("v1-sse", "/python/sse", "python", {"python", "cleanup_session"}),
        ("v1-http", "/mcp", "toolhost", {"python", "container_exec"}),
        ("v2", "/mcp", "toolhost", {"python", "container_exec"}),
    ],
)
def test_typescript_sdk_keeps_state_by_a_header(
    tool_host: RunningHost, which: str, path: str, name: str, tools: set[str]
) -> None:
    headers = {"x-session-id": f"ts-{which}"}
    script = [
        {"headers": headers, "calls": [["python", {"code": "x = 41"}], ["python", {}]]},
        {"headers": headers, "calls": [["python", {"code": "open('f.txt', 'w').write('a'); x + 1"}]]},
        {"calls": [["python", {"code": "x"}]]},
    ]
    report = drive("node", "typescript.cjs", tool_host.url + path, which, json.dumps(script))
    assert report["name"] == name
    assert tools <= report["tools"].keys()
    assert report["tools"]["python"]["title"] == "Run Python"
    assert report["tools"]["python"]["readOnlyHint"] is False
    first, second, other = report["connections"]
    assert first[1]["is_error"] and '"code"' in first[1]["text"]
    assert second[0]["text"].startswith("42\n")
    assert "NameError" in other[0]["text"]
    if which == "v2":
        assert report["protocol"] == "2026-07-28"


def inspect(
    host: RunningHost, *arguments: str, transport: str = "http", path: str = "/s/inspector/mcp"
) -> dict[str, object]:
    environment = ENVIRONMENTS["node"]
    inspector = (
        environment.modules / "@modelcontextprotocol" / "inspector" / "clients" / "launcher" / "build" / "index.js"
    )
    command = [str(environment.node), str(inspector), "--cli", host.url + path, "--transport", transport, *arguments]
    done = run("node", *command)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_inspector_lists_calls_and_reads(tool_host: RunningHost) -> None:
    tools = inspect(tool_host, "--method", "tools/list")["tools"]
    assert {"python", "container_exec"} <= {tool["name"] for tool in tools}  # type: ignore[attr-defined]
    code = "code=open('seen.txt', 'w').write('abc'); 6 * 7"
    result = inspect(tool_host, "--method", "tools/call", "--tool-name", "python", "--tool-arg", code)
    assert result["content"][0]["text"].startswith("42")  # type: ignore[index]
    listed = inspect(tool_host, "--method", "resources/list")["resources"]
    assert [resource["uri"] for resource in listed] == ["file:///mnt/data/seen.txt"]  # type: ignore[attr-defined]
    read = inspect(tool_host, "--method", "resources/read", "--uri", "file:///mnt/data/seen.txt")
    assert read["contents"][0]["text"] == "abc"  # type: ignore[index]


def test_inspector_calls_over_sse(tool_host: RunningHost) -> None:
    call = ["--method", "tools/call", "--tool-name", "exec", "--tool-arg", 'cmd=["echo", "hi"]']
    result = inspect(tool_host, *call, transport="sse", path="/container/sse")
    assert result["content"][0]["text"] == "hi\n[Exit code 0.]"  # type: ignore[index]
