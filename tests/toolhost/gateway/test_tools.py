"""Remote servers that requests name, images for a model with eyes, and what tools are told of a session."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.toolhost.gateway.conftest import Serve
from tests.toolhost.gateway.test_responses import PYTHON, SET
from tests.toolhost.loop.mcp_double import Double
from toolhost.gateway.remote import RemoteServers
from toolhost.gateway.taps import ToolImages
from toolhost.loop.ledger import Attempt, CallRecord, MemoryRegistry
from toolhost.loop.results import ToolResult
from toolhost.loop.transcript import call_item, output_item, user_message

PNG = "data:image/png;base64,AAAA"


async def test_an_allowed_remote_server_is_used_and_never_told_the_sessions_key(serve: Serve, double: Double) -> None:
    root = f"http://127.0.0.1:{double.port}/files/"
    read = {"calls": [{"name": "far_read", "arguments": {"path": "x"}}]}
    served = await serve([read, {"text": "done"}], remote_servers=(root,))
    tool: Any = {
        "type": "mcp",
        "server_label": "far",
        "server_url": f"{root}mcp",
        "require_approval": "never",
        "headers": {"x-api-key": "theirs"},
    }
    double.host.headers.clear()
    response: Any = await served.client.responses.create(model="fake", input="Read", tools=[tool])
    assert response.output_text == "done"
    assert [item.server_label for item in response.output if item.type == "mcp_call"] == ["far"]
    assert "headers" not in response.tools[0].model_fields_set
    assert double.host.headers
    for headers in double.host.headers:
        assert headers["x-api-key"] == "theirs"
        assert "x-toolhost-session" not in headers
    with pytest.raises(openai.BadRequestError, match="not among"):
        await served.client.responses.create(
            model="fake", input="x", tools=[{**tool, "server_url": f"http://127.0.0.1:{double.port}/python/sse"}]
        )


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://mcp.example.com/a/sse", True),
        ("https://mcp.example.com/a", True),
        ("https://mcp.example.com/ab", False),
        ("http://mcp.example.com/a/sse", False),
        ("https://mcp.example.com:8443/a/sse", False),
        ("https://mcp.example.com.evil.net/a/sse", False),
        ("https://mcp.example.com@evil.net/a/sse", False),
        ("https://user@mcp.example.com/a/sse", False),
        ("https://mcp.example.com/a/../b", False),
        ("https://mcp.example.com/a/%2e%2e/b", False),
        ("file:///a", False),
        ("https://[", False),
    ],
)
def test_a_remote_url_is_compared_by_its_parts(url: str, allowed: bool) -> None:
    assert RemoteServers(["https://mcp.example.com/a"])._allows(url) is allowed


async def test_the_hosts_tools_are_told_a_secret_key_that_clients_never_see(serve: Serve, double: Double) -> None:
    served = await serve([SET, {"text": "ok"}])
    response = await served.client.responses.create(model="fake", input="Set x", tools=[PYTHON])
    [key] = {headers["x-toolhost-session"] for headers in double.host.headers}
    assert len(key) > 30
    assert key not in response.model_dump_json()
    assert {headers["x-toolhost-content"] for headers in double.host.headers} == {"rich"}
    trace = await served.http.get(f"/v1/responses/{response.id}/trace")
    assert trace.json()["calls"][0]["terminal"] == "result"
    assert key not in trace.text


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_images_of_a_call_are_shown_where_the_wire_has_a_place_for_them(dialect: str) -> None:
    registry = MemoryRegistry()
    attempt = Attempt("a1", 1, 2e9)
    await registry.insert_call(
        CallRecord("t", 1, "call_1", "python.python", "d", "python", "ann", (attempt,), terminal="result", content="c")
    )
    images = ToolImages(registry, wanted=True)
    images.note("a1", ToolResult("plotted", images=(PNG,)))
    items = [user_message("plot"), call_item("call_1", "python", "{}"), output_item("call_1", "plotted")]
    shown = await images.shown(items, dialect)
    assert shown[:2] == items[:2]
    if dialect == "chat":
        assert shown[2] == items[2]
        assert shown[3]["role"] == "user"
        assert shown[3]["content"][1]["image_url"] == PNG
    else:
        assert [part["type"] for part in shown[2]["output"]] == ["input_text", "input_image"]
        assert await images.shown(shown, dialect) == shown
    unwanted = ToolImages(registry, wanted=False)
    unwanted.note("a1", ToolResult("plotted", images=(PNG,)))
    assert await unwanted.shown(items, dialect) == items


@pytest.mark.parametrize(
    ("tool", "narrowed"),
    [
        (
            {"type": "web_search", "filters": {"allowed_domains": ["example.org", "docs.python.org"]}},
            {"x-toolhost-allow-domains": "example.org,docs.python.org"},
        ),
        (
            {"type": "web_search", "filters": {"allowed_domains": ["bücher.example"]}},
            {"x-toolhost-allow-domains": "xn--bcher-kva.example"},
        ),
        (
            {"type": "mcp", "server_label": "browser", "headers": {"X-Toolhost-Deny-Domains": "example.org"}},
            {"x-toolhost-deny-domains": "example.org"},
        ),
    ],
)
async def test_what_narrows_a_search_reaches_the_tool_host(
    serve: Serve, double: Double, tool: Any, narrowed: dict[str, str]
) -> None:
    searching = {"calls": [{"name": "browser_search", "arguments": {"query": "x"}}]}
    served = await serve([searching, {"text": "done"}])
    double.host.headers.clear()
    await served.client.responses.create(model="fake", input="Search", tools=[tool])
    assert double.host.headers
    for headers in double.host.headers:
        assert {name: value for name, value in headers.items() if name.endswith("domains")} == narrowed
