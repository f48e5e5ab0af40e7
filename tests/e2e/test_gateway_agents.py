"""The OpenAI Agents SDK as a real client: function tools, hosted tools, and an approval that interrupts a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.clients.environments import ENVIRONMENTS
from tests.toolhost.gateway.conftest import gateway_over
from tests.toolhost.loop.mcp_double import Double, serving
from toolhost.loop.tool_client import Endpoint, McpToolServer

SCRIPT = Path(__file__).parent / "gateway_agents_script.py"


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    async with serving() as server:
        yield server


@pytest.mark.clients
async def test_the_agents_sdk_runs_functions_hosted_tools_and_approvals(double: Double, tmp_path: Path) -> None:
    environment = ENVIRONMENTS["openai-agents"]
    rounds = [
        {"calls": [{"name": "get_weather", "arguments": {"city": "Bern"}}], "when": "weather"},
        {"text": "It is sunny.", "when": "weather"},
        {"calls": [{"name": "python", "arguments": {"code": "print(42)"}}], "when": "coding"},
        {"text": "It is 42.", "when": "coding"},
        {"calls": [{"name": "container_exec", "arguments": {"cmd": ["rm", "x"]}}], "when": "careful"},
        {"text": "Removed.", "when": "careful"},
    ]
    endpoints = [Endpoint.parse(double.at(name)) for name in ("python", "container")]
    async with gateway_over(await McpToolServer.connect(endpoints), tmp_path, rounds) as served:
        process = await asyncio.create_subprocess_exec(
            *(str(environment.python), str(SCRIPT), served.url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-6000:]
    report = json.loads(out.decode().partition("REPORT ")[2])
    assert report.pop("streamed") > 5
    assert report == {
        "weather": "It is sunny.",
        "coding": "It is 42.",
        "interruptions": 1,
        "approved": "Removed.",
    }
    assert [(namespace, name) for namespace, name, _ in double.host.runs] == [
        ("python", "python"),
        ("container", "exec"),
    ]
