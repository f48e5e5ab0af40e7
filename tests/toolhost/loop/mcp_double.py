"""A small real MCP server on loopback, for the loop's tests: two namespaces, receipts, and a switch to kill it.

It is built on the `mcp` SDK, keeps each session's variables by the session header, and honours attempt ids, which it
remembers across `kill` and `start`, as a host whose sandboxes outlive it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.sse import SseServerTransport
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

ATTEMPT = "toolhost/attempt-id"


@dataclass
class Host:
    """What outlives a killed server. `runs` counts executions; `gates` lets a test hold a call."""

    variables: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    cleaned: list[tuple[str, str]] = field(default_factory=list)
    attempts: dict[tuple[str, str], asyncio.Future[str]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    posted_from: list[int] = field(default_factory=list)
    honours_attempts: bool = True
    keeps_sessions: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    orders: dict[str, tuple[str, str]] = field(default_factory=dict)
    met: asyncio.Event = field(default_factory=asyncio.Event)
    active: set[str] = field(default_factory=set)
    running: list[asyncio.Task[None]] = field(default_factory=list)

    def forget(self) -> None:
        """As if nothing had been asked yet."""
        for kept in (self.variables, self.runs, self.cleaned, self.attempts, self.headers):
            kept.clear()
        self.met.clear()

    async def execute(self, session: str, namespace: str, name: str, args: dict[str, Any], attempt: str | None) -> str:
        """Run a call; under an attempt id it is run once, whoever waits for it."""
        if attempt is None or not self.honours_attempts:
            return await self._run(session, namespace, name, args)
        key = (session, attempt)
        if key not in self.attempts:
            future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self.attempts[key] = future
            self.running.append(asyncio.create_task(self._finish(future, session, namespace, name, args)))
        return await asyncio.shield(self.attempts[key])

    async def _finish(
        self, future: asyncio.Future[str], session: str, namespace: str, name: str, args: dict[str, Any]
    ) -> None:
        future.set_result(await self._run(session, namespace, name, args))

    async def _run(self, session: str, namespace: str, name: str, args: dict[str, Any]) -> str:
        self.runs.append((namespace, name, args))
        self.active.add(namespace)
        self.started.set()
        try:
            if "meet" in str(args):
                await self._meet()
            if args.get("hold") or "hold()" in str(args.get("code", "")):
                await self.gate.wait()
            await asyncio.sleep(0.01)
            return self._answer(session, namespace, name, args)
        finally:
            self.active.discard(namespace)

    async def _meet(self) -> None:
        """Wait until two namespaces are at work at the same time."""
        if len(self.active) > 1:
            self.met.set()
        await self.met.wait()

    def _answer(self, session: str, namespace: str, name: str, args: dict[str, Any]) -> str:
        if "repeat" in args:
            return "y" * (int(args["repeat"]) + 1)
        if namespace != "python":
            return json.dumps({name: args}, sort_keys=True)
        code = str(args.get("code", "")).replace("hold()", "None")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, self.variables.setdefault(session, {}))  # the tests' own code
        return out.getvalue() or "(no output)"


_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}}
_TOOLS: dict[str, list[types.Tool]] = {
    "python": [types.Tool(name="python", description="Run code", input_schema={"type": "object"})],
    "browser": [
        types.Tool(name="search", description="Search", input_schema=_QUERY),
        types.Tool(name="open", description="Open", input_schema={"type": "object"}),
    ],
    "container": [types.Tool(name="exec", description="Run a command", input_schema={"type": "object"})],
    "files": [
        types.Tool(
            name="read",
            description="Read",
            input_schema={"type": "object"},
            annotations=types.ToolAnnotations(read_only_hint=True),
        ),
        types.Tool(name="write", description="Write", input_schema={"type": "object"}),
    ],
}


def _server(host: Host, namespace: str) -> Server[Any]:
    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        meta = {"toolhost/attempts": True} if host.honours_attempts else {}
        tools = [
            tool.model_copy(update={"meta": {**meta, "include_in_prompt": tool.name != "python"}})
            for tool in _TOOLS[namespace]
        ]
        clean = types.Tool(name="cleanup_session", description="End", input_schema={"type": "object"})
        return types.ListToolsResult(tools=[*tools, clean] if host.keeps_sessions else tools)

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        session = context.request.headers.get("x-session-id", "")
        host.headers.append(dict(context.request.headers))
        if params.name == "cleanup_session":
            host.cleaned.append((session, namespace))
            return _text("cleaned")
        attempt = (params.meta or {}).get(ATTEMPT) if params.meta else None
        try:
            return _text(await host.execute(session, namespace, params.name, params.arguments or {}, attempt))
        except asyncio.CancelledError:
            host.cancelled.append(params.name)
            host.was_cancelled.set()
            raise

    return Server(namespace, instructions=f"The {namespace} tool.", on_list_tools=list_tools, on_call_tool=call_tool)


def _text(text: str) -> types.CallToolResult:
    """A result; one that says it is an error is one."""
    failed = text.startswith("Error: ")
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)


def _routes(host: Host, namespace: str) -> list[Any]:
    server = _server(host, namespace)
    sse = SseServerTransport(f"/{namespace}/messages/")

    async def connect(request: Request) -> Response:
        async with sse.connect_sse(request.scope, request.receive, request._send) as (reader, writer):
            await server.run(reader, writer, server.create_initialization_options())
        return Response()

    async def post(scope: Any, receive: Any, send: Any) -> None:
        host.posted_from.append(scope["client"][1])
        await sse.handle_post_message(scope, receive, send)

    return [Route(f"/{namespace}/sse", connect), Mount(f"/{namespace}/messages/", app=post)]


class Double:
    """The server, which can be killed and started again on its port."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.port = 0
        self._task: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None

    def at(self, namespace: str) -> str:
        return f"127.0.0.1:{self.port}/{namespace}"

    async def start(self) -> None:
        http = _server(self.host, "files").streamable_http_app(streamable_http_path="/files/mcp")
        routes = [route for name in _TOOLS for route in _routes(self.host, name)]
        app = Starlette(routes=[*routes, *http.routes], lifespan=lambda _: http.router.lifespan_context(http))
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="critical", lifespan="on")
        self._server = uvicorn.Server(config)
        socket = config.bind_socket()
        self.port = socket.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([socket]))
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)

    async def kill(self) -> None:
        """Stop listening and cut every connection at once, as a killed process does."""
        assert self._server is not None and self._task is not None
        for listener in self._server.servers:
            listener.close()
        self._cut()
        self._server.should_exit = True
        self._server.force_exit = True
        await asyncio.wait({self._task}, timeout=5)
        self._cut()  # those that were accepted in the same moment

    def _cut(self) -> None:
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            transport = connection.transport
            if transport is not None:
                transport.abort()


@contextlib.asynccontextmanager
async def serving(host: Host | None = None) -> AsyncIterator[Double]:
    double = Double(host or Host())
    await double.start()
    try:
        yield double
    finally:
        double.host.gate.set()
        await double.kill()
        for task in double.host.running:
            task.cancel()
