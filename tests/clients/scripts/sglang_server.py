"""Drives SGLang's own MCPToolServer, out of its wheel, against a tool host. Runs in its environment.

usage: sglang_server.py MODULE TOOL_SERVER   (MODULE: its file; TOOL_SERVER: what `--tool-server` takes)

For each response SGLang opens a session of every namespace, calls in them, and leaves; it sends no header.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from contextlib import AsyncExitStack


async def response(server: object, namespaces: list[str], calls: list[tuple[str, str, dict[str, object]]]) -> list[str]:
    async with AsyncExitStack() as stack:
        sessions = {name: await stack.enter_async_context(server.get_tool_session(name)) for name in namespaces}
        results = [await sessions[name].call_tool(tool, arguments) for name, tool, arguments in calls]
        return [result.content[0].text for result in results]


async def main() -> None:
    spec = importlib.util.spec_from_file_location("tool_server", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.MCPToolServer()
    await server.add_tool_server(sys.argv[2])
    namespaces = list(server.harmony_tool_descriptions)
    report = {
        "namespaces": namespaces,
        "tools": {
            name: [tool.name for tool in description.tools]
            for name, description in server.harmony_tool_descriptions.items()
        },
        "first": await response(
            server,
            namespaces,
            [
                ("python", "python", {"code": "x = 41"}),
                ("python", "python", {"code": "x + 1"}),
                ("container", "exec", {"cmd": ["echo", "hello"]}),
            ],
        ),
        "second": await response(server, namespaces, [("python", "python", {"code": "x"})]),
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
