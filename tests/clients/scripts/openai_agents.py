"""Drives a tool host with the MCP clients of the OpenAI Agents SDK. Runs in that SDK's environment.

usage: openai_agents.py HOST SESSION   (HOST: http://…, SESSION: a retained key)
"""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, RunContextWrapper
from agents.mcp import MCPServerSse, MCPServerStreamableHttp, MCPUtil


async def main() -> None:
    host, session = sys.argv[1:3]
    report: dict[str, object] = {}
    async with MCPServerStreamableHttp(params={"url": f"{host}/s/{session}/mcp"}) as server:
        report["tools"] = [tool.name for tool in await server.list_tools()]
        report["first"] = (await server.call_tool("python", {"code": "x = 41; x"})).content[0].text
        # Strict schemas are what an agent's model is given.
        context = RunContextWrapper(context=None)
        strict = await MCPUtil.get_function_tools(server, True, context, Agent(name="a"))
        report["functions"] = sorted(tool.name for tool in strict)
    params = {"url": f"{host}/python/sse", "headers": {"x-toolhost-session": session}}
    async with MCPServerSse(params=params) as server:
        report["second"] = (await server.call_tool("python", {"code": "x + 1"})).content[0].text
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
