"""Drives vLLM's own classes against a tool host's browser. Runs in vLLM's environment.

usage: vllm_browser.py TOOL_SERVER CALLS KEY      (CALLS: JSON list of [tool, arguments] for one response)

It prints one JSON object: `rendered`, the system prompt from the host's listing; `trained`, the one with the package's
own tools; the texts of `calls` in one response, and of `again`: `find` in another response that has the retained KEY.
"""

from __future__ import annotations

import asyncio
import json
import sys

from openai_harmony import ToolNamespaceConfig
from vllm.entrypoints.mcp.tool_server import MCPToolServer
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding, get_system_message
from vllm_harmony import response

NAMESPACES = ["python", "browser"]


def prompt(python: object, browser: object) -> str:
    message = get_system_message(
        start_date="2026-01-01",
        python_description=python,
        browser_description=browser,  # type: ignore[arg-type]
    )
    return str(get_encoding().decode_utf8(get_encoding().render(message)))


async def main() -> None:
    tool_server, calls, key = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    server = MCPToolServer()
    await server.add_tool_server(tool_server)
    report: dict[str, object] = {
        "namespaces": list(server.harmony_tool_descriptions),
        "rendered": prompt(*(server.get_tool_description(name) for name in NAMESPACES)),
        "trained": prompt(ToolNamespaceConfig.python(), ToolNamespaceConfig.browser()),
    }
    asked = [[f"browser.{tool}", json.dumps(arguments)] for tool, arguments in calls]
    headers = {"x-toolhost-session": key}
    report["calls"] = await response(server, NAMESPACES, asked, headers)
    report["again"] = await response(server, NAMESPACES, [["browser.find", '{"pattern": "corpus"}']], headers)
    report["other"] = await response(server, NAMESPACES, [["browser.find", '{"pattern": "corpus"}']], None)
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
