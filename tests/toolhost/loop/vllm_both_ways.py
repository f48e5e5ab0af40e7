"""Runs in vLLM's environment: the driver over vLLM's tool server and ours, then vLLM's context over ours.

Prints one line, `REPORT` and a JSON object.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

from openai_harmony import Author, Message, Role, TextContent
from vllm.entrypoints.mcp.tool_server import MCPToolServer
from vllm.entrypoints.openai.responses.context import HarmonyContext
from vllm.parser.harmony import HarmonyParser

from tests.toolhost.loop.checks import check_stream
from tests.toolhost.loop.mcp_double import Double, serving
from toolhost.loop import fake_model
from toolhost.loop.driver import LoopDriver
from toolhost.loop.ids import CountingIds
from toolhost.loop.models.registry import connect
from toolhost.loop.request import LoopRequest
from toolhost.loop.tool_client import McpToolServer

NAMESPACES = ["python", "browser", "container"]
ROUNDS: list[dict[str, Any]] = [
    {
        "calls": [
            {"name": "python", "arguments": {"code": "x = 41"}},
            {"name": "browser_search", "arguments": {"query": "q"}},
        ]
    },
    {"calls": [{"name": "python", "arguments": {"code": "print(x + 1)"}}]},
    {"text": "42"},
]
TOOLS = [
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "web_search_preview"},
    {"type": "mcp", "server_label": "container", "require_approval": "never"},
]
CALLS = [
    ("python", "x = 5"),
    ("python", "print(x)"),
    ("browser.search", '{"query": "z"}'),
    ("container.exec", '{"cmd": ["ls"]}'),
]


async def drive(server: Any, double: Double) -> dict[str, Any]:
    double.host.forget()
    async with fake_model.serving(ROUNDS) as (model, url):
        client = connect("chat", url)
        run = await LoopDriver(client, tools=server, ids=CountingIds()).start(LoopRequest("fake", "hi", tools=TOOLS))
        check_stream([event async for event in run.events()])
        result = await run.result()
        await client.aclose()
        return {
            "transcript": result.transcript,
            "offered": [tool["function"] for tool in model.requests[0]["tools"]],
            "cleaned": sorted(double.host.cleaned),
        }


async def harmony(server: Any, double: Double) -> dict[str, Any]:
    double.host.forget()
    # The context only wants the parser's type: no tokens are parsed, the calls are scripted.
    context = HarmonyContext([], NAMESPACES, frozenset(), response_parser=object.__new__(HarmonyParser))
    answers = []
    async with AsyncExitStack() as stack:
        await context.init_tool_sessions(server, stack, "resp_abc", {})
        for recipient, text in CALLS:
            author, content = Author(role=Role.ASSISTANT), [TextContent(text=text)]
            context.messages.append(Message(author=author, content=content, recipient=recipient, channel="analysis"))
            (answer,) = await context.call_tool()
            answers.append(answer.content[0].text)
    return {"answers": answers, "cleaned": sorted(double.host.cleaned)}


async def main() -> None:
    async with serving() as double:
        theirs = MCPToolServer()
        await theirs.add_tool_server(",".join(double.at(name) for name in NAMESPACES))
        ours = await McpToolServer.connect([double.at(name) for name in NAMESPACES])
        report = {
            "theirs": await drive(theirs, double),
            "ours": await drive(ours, double),
            "harmony": await harmony(ours, double),
        }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
