"""Drives a tool host with an mcp client of any version since 1.12. Runs in that client's environment.

usage: mcp_sse.py URL SCRIPT   with SCRIPT a JSON list of connections: {"headers": {...}, "calls": [[tool, args], ...]}

It prints one JSON object: server name, instructions, tools, and per connection the texts of its calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version

from mcp import ClientSession
from mcp.client.sse import sse_client


def either(thing: object, snake: str, camel: str) -> object:
    """mcp 2 names fields in snake case, mcp 1 as on the wire."""
    return getattr(thing, snake, None) or getattr(thing, camel, None)


async def main() -> None:
    url, script = sys.argv[1], json.loads(sys.argv[2])
    report: dict[str, object] = {"client": version("mcp"), "connections": []}
    for connection in script:
        async with (
            sse_client(url, headers=connection.get("headers")) as streams,
            ClientSession(*streams) as session,
        ):
            hello = await session.initialize()
            listed = await session.list_tools()
            report["name"] = either(hello, "server_info", "serverInfo").name  # type: ignore[union-attr]
            report["instructions"] = hello.instructions
            report["tools"] = [tool.name for tool in listed.tools]
            results = []
            for tool, arguments in connection["calls"]:
                result = await session.call_tool(tool, arguments)
                results.append(
                    {
                        "text": result.content[0].text,
                        "blocks": len(result.content),
                        "is_error": bool(either(result, "is_error", "isError")),
                    }
                )
            report["connections"].append(results)  # type: ignore[attr-defined]
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
