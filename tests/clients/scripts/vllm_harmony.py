"""Drives vLLM's own MCPToolServer and HarmonyContext against a tool host, without an engine. Runs in its environment.

usage: vllm_harmony.py TOOL_SERVER SCRIPT   (TOOL_SERVER is what `vllm serve --tool-server` takes; SCRIPT is a JSON list
of responses: {"calls": [[recipient, text], ...], "headers": {...}, "namespaces": [...]}, the last two optional)

It does what vLLM does around a model: list at start, render the system prompt, open sessions per response, run the
model's calls (scripted here), clean up. It prints one JSON object: namespaces, prompt, turns, calls after the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from contextlib import AsyncExitStack

from openai.types.responses.tool import Mcp
from openai_harmony import Author, Message, Role, TextContent
from vllm.entrypoints.mcp.tool_server import MCPToolServer
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding, get_system_message
from vllm.entrypoints.openai.responses.context import HarmonyContext
from vllm.parser.harmony import HarmonyParser


def scripted_call(recipient: str, text: str) -> Message:
    """What the parser makes of a model's tool call."""
    return Message(
        author=Author(role=Role.ASSISTANT),
        content=[TextContent(text=text)],
        recipient=recipient,
        channel="analysis",
    )


def harmony_parser() -> HarmonyParser:
    # The context only wants the type here: no tokens are parsed, the calls are scripted.
    return object.__new__(HarmonyParser)


async def response(
    server: MCPToolServer, namespaces: list[str], calls: list[list[str]], headers: dict[str, str] | None
) -> list[str]:
    """One response as vLLM runs it: sessions for every enabled namespace, then call after call, then clean-up."""
    request_id = f"resp_{uuid.uuid4().hex}"
    mcp_tools = {}
    if headers:
        for label in ("code_interpreter", "web_search_preview", "container"):
            mcp_tools[label] = Mcp(type="mcp", server_label=label, headers=headers)
    context = HarmonyContext([], namespaces, frozenset(), response_parser=harmony_parser())
    texts = []
    async with AsyncExitStack() as stack:
        await context.init_tool_sessions(server, stack, request_id, mcp_tools)
        for recipient, text in calls:
            context.messages.append(scripted_call(recipient, text))
            assert context.need_builtin_tool_call(), recipient
            (answer,) = await context.call_tool()
            context.append_tool_output([answer])
            texts.append(answer.content[0].text)
    return texts


async def main() -> None:
    tool_server, script = sys.argv[1], json.loads(sys.argv[2])
    server = MCPToolServer()
    await server.add_tool_server(tool_server)
    namespaces = list(server.harmony_tool_descriptions)
    descriptions = {
        f"{name}_description": server.get_tool_description(name)
        for name in namespaces
        if name in ("python", "browser", "container")
    }
    message = get_system_message(start_date="2026-01-01", **descriptions)
    prompt = get_encoding().decode_utf8(get_encoding().render(message))
    report: dict[str, object] = {"namespaces": namespaces, "prompt": prompt, "responses": []}
    for one in script:
        texts = await response(server, one.get("namespaces", namespaces), one["calls"], one.get("headers"))
        report["responses"].append(texts)  # type: ignore[attr-defined]
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
