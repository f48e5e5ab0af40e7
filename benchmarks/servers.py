"""The floor and the ceiling to measure against: an empty tool on the same SDK, and bare starlette.

usage: python -m benchmarks.servers (empty-mcp | bare) PORT
"""

from __future__ import annotations

import sys

import mcp_types as types
import uvicorn
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.sse import SseServerTransport
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

KEEP_ALIVE_S = 75  # as toolhost's (`toolhost.cli.serve`)
TOOL = types.Tool(name="empty", description="Answers 2.", input_schema={"type": "object", "properties": {}})


def empty_mcp() -> Starlette:
    """One tool that does nothing, served as the SDK's documentation shows."""

    async def list_tools(
        context: ServerRequestContext, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[TOOL])

    async def call_tool(context: ServerRequestContext, params: types.CallToolRequestParams) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(type="text", text="2")])

    server = Server("empty", on_list_tools=list_tools, on_call_tool=call_tool)
    transport = SseServerTransport("/messages/")

    async def sse(request: Request) -> Response:
        async with transport.connect_sse(request.scope, request.receive, request._send) as streams:
            await server.run(streams[0], streams[1], server.create_initialization_options())
        return Response()

    return Starlette(routes=[Route("/sse", sse), Mount("/messages/", app=transport.handle_post_message)])


def bare() -> Starlette:
    """The smallest POST endpoint that starlette makes."""

    async def answer(request: Request) -> Response:
        await request.body()
        return JSONResponse({"result": 2})

    return Starlette(routes=[Route("/", answer, methods=["POST"])])


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    app = {"empty-mcp": empty_mcp, "bare": bare}[kind]()
    uvicorn.run(
        app, host="127.0.0.1", port=port, log_level="critical", access_log=False, timeout_keep_alive=KEEP_ALIVE_S
    )


if __name__ == "__main__":
    main()
