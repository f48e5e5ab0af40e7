"""Drives a tool host with FastMCP's client. Runs in that client's environment.

usage: fastmcp_client.py URL
"""

from __future__ import annotations

import asyncio
import json
import sys

from fastmcp import Client


async def main() -> None:
    report: dict[str, object] = {}
    async with Client(sys.argv[1]) as client:
        report["tools"] = [tool.name for tool in await client.list_tools()]
        made = await client.call_tool("python", {"code": "open('made.txt', 'w').write('abc'); x = 41"})
        report["blocks"] = [block.type for block in made.content]
        result = await client.call_tool("python", {"code": "x + 1"})
        report["text"], report["structured"] = result.content[0].text, result.structured_content
        report["resources"] = [str(resource.uri) for resource in await client.list_resources()]
        report["read"] = (await client.read_resource("file:///mnt/data/made.txt"))[0].text
        wrong = await client.call_tool("python", {}, raise_on_error=False)
        report["wrong"] = wrong.content[0].text
    async with Client(sys.argv[1]) as client:
        report["again"] = (await client.call_tool("python", {"code": "x"})).content[0].text
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
