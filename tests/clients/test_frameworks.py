"""MCP clients of agent frameworks, each from its own environment, unchanged."""

from __future__ import annotations

import pytest

from tests.clients.drive import drive
from tests.clients.environments import ENVIRONMENTS
from tests.support.host import RunningHost

pytestmark = [pytest.mark.clients, pytest.mark.bubblewrap]


def test_fastmcp_finds_tools_results_and_resources(tool_host: RunningHost) -> None:
    report = drive("fastmcp", "fastmcp_client.py", f"{tool_host.url}/s/fastmcp/mcp")
    assert {"python", "container_exec"} <= set(report["tools"])
    assert report["text"] == report["structured"]["text"] == "42"
    assert report["blocks"] == ["text", "resource_link"]
    assert report["resources"] == ["file:///mnt/data/made.txt"]
    assert report["read"] == "abc"
    assert '"code"' in report["wrong"]
    assert report["again"] == "41", "the URL names the session"


def test_openai_agents_reaches_one_session_over_both_transports(tool_host: RunningHost) -> None:
    report = drive("openai-agents", "openai_agents.py", tool_host.url, "openai-agents")
    assert {"python", "container_exec"} <= set(report["tools"])
    assert report["functions"] == sorted(report["tools"]), "every schema can be made strict"
    assert [report["first"], report["second"]] == ["41", "42"]


def test_sglang_registers_the_namespaces_and_a_response_is_a_session(tool_host: RunningHost) -> None:
    module = ENVIRONMENTS["sglang"].directory / "sglang" / "srt" / "entrypoints" / "openai" / "tool_server.py"
    servers = f"{tool_host.address}/python,{tool_host.address}/container"
    report = drive("sglang", "sglang_server.py", str(module), servers)
    assert report["namespaces"] == ["python", "container"]
    assert report["tools"] == {"python": [], "container": ["exec"]}, "hidden tools stay out of the prompt"
    assert report["first"][1:] == ["42", "hello\n[Exit code 0.]"]
    assert "NameError" in report["second"][0]
