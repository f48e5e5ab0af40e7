"""Makes one call and waits for it; whoever started it kills it meanwhile. Runs in an mcp client's environment.

usage: mcp_leave.py URL SESSION CODE
"""

from __future__ import annotations

import asyncio
import sys

from mcp import ClientSession
from mcp.client.sse import sse_client


async def main(url: str, session: str, code: str) -> None:
    async with sse_client(url, headers={"x-session-id": session}) as streams, ClientSession(*streams) as client:
        await client.initialize()
        await client.call_tool("python", {"code": code})


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
