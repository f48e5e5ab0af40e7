"""Our client of MCP tool servers: vLLM's `ToolServer` shape over Server-Sent Events and Streamable HTTP.

Above: the driver, or vLLM's contexts. Below: the `mcp` package's client. One session is one namespace under one session
key. A session outlives its connection: when the connection breaks, the next call opens a new one under the same key,
and a call that was running is asked for again under its attempt id, if the server says that it honours those.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2
import mcp_types as types
from mcp import ClientSession, MCPError
from mcp.client.streamable_http import streamable_http_client

from toolhost.loop.errors import RequestError, ToolError, ToolServerGone
from toolhost.loop.sse_transport import LIMITS, MAX_EVENT_BYTES, SESSION_UNKNOWN, sse_streams
from toolhost.loop.tools import CLEANUP_TOOL

ATTEMPT_META_KEY = "toolhost/attempt-id"
SESSION_HEADER = "x-session-id"
RETAINED_HEADER = "x-toolhost-session"
HONOURED_META_KEY = "toolhost/attempts"
"""The `_meta` key of a tool by which a host says that it honours attempt ids."""

CLIENT_INFO = types.Implementation(name="toolhost-loop", version="1")

_CONNECT_SECONDS = 15.0
_READ_SECONDS = 300.0
_CLEANUP_SECONDS = 10.0
_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt to connect again."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a namespace is. `label` replaces the server's own name; `attempts` says whether the host honours
    attempt ids, where its tools do not say so themselves."""

    url: str
    transport: str = "sse"
    headers: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None
    attempts: bool | None = None

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """From `HOST:PORT/python` (SSE, as in vLLM's `--tool-server`) or a whole URL; one ending in `/mcp` is HTTP.

        Raises RequestError for what is neither.
        """
        text = text.strip()
        url = text if "://" in text else f"http://{text}/sse"
        try:
            urlsplit(url)  # refuses brackets around no address, which some versions of httpx2 take for a name
            parts = httpx2.URL(url)
            usable = parts.scheme in ("http", "https") and bool(parts.host) and (parts.port or 1) < 65536
        except (httpx2.InvalidURL, ValueError):
            usable = False
        if not usable or not text.isprintable() or " " in text:
            raise RequestError(f"{text!r} is not HOST:PORT/namespace or an http(s) URL", "tools")
        return cls(url, "sse" if parts.path.rstrip("/").endswith("/sse") else "http")


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """One tool, as the model is told of it."""

    name: str
    description: str
    parameters: dict[str, Any]
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class NamespaceDescription:
    """A namespace: its server's name and instructions, and the tools that belong into the prompt."""

    name: str
    description: str | None
    tools: list[ToolDescription]


@dataclass(frozen=True, slots=True)
class _Known:
    endpoint: Endpoint
    description: NamespaceDescription
    attempts: bool
    cleans_up: bool


class McpToolServer:
    """Namespaces behind MCP endpoints. Make one with `connect`."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    @classmethod
    async def connect(cls, endpoints: Sequence[Endpoint | str]) -> McpToolServer:
        """List every endpoint once. Two endpoints of one name: the first is kept. Raises ToolServerGone."""
        server = cls()
        for endpoint in endpoints:
            await server.add(Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint)
        return server

    async def add(self, endpoint: Endpoint) -> str:
        """List one endpoint and return the name of its namespace. Raises ToolServerGone if it cannot be reached."""
        connection = _Connection(endpoint, {})
        session, info = await connection.open()
        try:
            listed = await session.list_tools()
        except MCPError as error:
            raise ToolServerGone(f"{endpoint.url} did not list its tools: {error}") from error
        finally:
            await connection.close()
        name = endpoint.label or info.server_info.name
        honoured = any((tool.meta or {}).get(HONOURED_META_KEY) is True for tool in listed.tools)
        attempts = honoured if endpoint.attempts is None else endpoint.attempts
        cleans_up = any(tool.name == CLEANUP_TOOL for tool in listed.tools)
        tools = [_described(tool) for tool in listed.tools if _in_prompt(tool)]
        known = _Known(endpoint, NamespaceDescription(name, info.instructions, tools), attempts, cleans_up)
        self._known.setdefault(name, known)
        return name

    @property
    def namespaces(self) -> list[str]:
        return list(self._known)

    def has_tool(self, name: str) -> bool:
        return name in self._known

    def get_tool_description(self, name: str, allowed_tools: list[str] | None = None) -> NamespaceDescription | None:
        known = self._known.get(name)
        if known is None or allowed_tools is None:
            return known.description if known else None
        tools = [tool for tool in known.description.tools if tool.name in allowed_tools]
        return NamespaceDescription(name, known.description.description, tools) if tools else None

    @asynccontextmanager
    async def new_session(
        self, name: str, session_id: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[McpSession]:
        """A session under `x-session-id: session_id`; `headers` may add to it, or replace it by its exact name.

        Connects at once (which costs the host no sandbox). Raises KeyError for an unknown namespace, ToolServerGone if
        the host cannot be reached.
        """
        known = self._known.get(name)
        if known is None:
            raise KeyError(f"there is no tool namespace {name!r}")
        merged = {SESSION_HEADER: session_id, **known.endpoint.headers, **(headers or {})}
        session = McpSession(known, merged)
        await session.open()
        try:
            yield session
        finally:
            await session.close()


class McpSession:
    """A session of one namespace. Calls may come from any task, and wait for each other only at the host."""

    def __init__(self, known: _Known, headers: Mapping[str, str]) -> None:
        self._known = known
        self._headers = headers
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._client_info = CLIENT_INFO

    async def open(self) -> None:
        await self._connected()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def call_tool(self, name: str, args: dict[str, Any]) -> types.CallToolResult:
        """Call a tool once. Raises ToolError, or ToolServerGone if the call's fate is not known."""
        if name == CLEANUP_TOOL:
            return await self._clean_up(args)
        return await self._once(name, args, None)

    async def call_attempt(self, name: str, args: dict[str, Any], attempt: str) -> types.CallToolResult:
        """Call a tool under an attempt id; if the connection breaks, connect again and join the same attempt.

        Only where the server honours attempt ids: elsewhere asking again could run the call twice. Raises ToolError, or
        ToolServerGone if the call's fate is not known.
        """
        try:
            return await self._once(name, args, attempt)
        except ToolServerGone:
            if not self._known.attempts:
                raise
        return await self._once(name, args, attempt)

    async def _once(self, name: str, args: dict[str, Any], attempt: str | None) -> types.CallToolResult:
        try:
            return await self._sent(name, args, attempt)
        except _NotSent:
            return await self._sent(name, args, attempt)

    async def _sent(self, name: str, args: dict[str, Any], attempt: str | None) -> types.CallToolResult:
        session = await self._connected()
        try:
            return await _call(session, name, args, attempt)
        except ToolServerGone:
            if self._connection is not None and self._connection.session is session:
                self._connection.session = None  # the next call connects again
            raise

    async def _clean_up(self, args: dict[str, Any]) -> types.CallToolResult:
        if not self._known.cleans_up:
            text = types.TextContent(type="text", text="This server keeps no session.")
            return types.CallToolResult(content=[text])
        async with asyncio.timeout(_CLEANUP_SECONDS):
            return await self._once(CLEANUP_TOOL, args, None)

    async def _connected(self) -> ClientSession:
        async with self._connecting:
            if self._connection is not None and self._connection.session is not None:
                return self._connection.session
            if self._connection is None:
                return await self._connect()
            await self._connection.close()
            for pause in _PAUSES:
                # Connecting runs nothing, so it may be tried until a restarted host is back.
                await asyncio.sleep(pause)
                with contextlib.suppress(ToolServerGone):
                    return await self._connect()
            return await self._connect()

    async def _connect(self) -> ClientSession:
        self._connection = _Connection(self._known.endpoint, self._headers)
        session, _ = await self._connection.open()
        return session


class _NotSent(ToolServerGone):
    """The host no longer knows the connection, so it did not take the call: asking again is safe."""


class _Watched:
    """A transport's read stream that tells when it has ended: then a connection is dead, though nobody used it."""

    def __init__(self, inner: Any, ended: Callable[[], None]) -> None:
        self._inner = inner
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __aenter__(self) -> _Watched:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> Any:
        return await self._inner.__aexit__(*details)

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._inner.__anext__()
        except BaseException:
            self._ended()
            raise


class _Connection:
    """One connection, in a task of its own: the SDK's context managers must be left by the task that entered them."""

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._headers = {**endpoint.headers, **headers}
        self._task: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self.session: ClientSession | None = None
        """None before it is open and after it broke."""

    async def open(self) -> tuple[ClientSession, types.InitializeResult]:
        """Raises ToolServerGone."""
        ready: asyncio.Future[tuple[ClientSession, types.InitializeResult]] = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # its waiter may have gone
        self._task = asyncio.create_task(self._run(ready))
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await asyncio.shield(ready)
        except TimeoutError:
            await self.close()
            raise ToolServerGone(f"{self._where} did not answer within {_CONNECT_SECONDS:.0f} s") from None
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        self._leave.set()
        self.session = None
        if self._task is None or self._task.done():
            return
        _, pending = await asyncio.wait({self._task}, timeout=_CLEANUP_SECONDS)
        for task in pending:
            task.cancel()
            await asyncio.wait({task}, timeout=_CLEANUP_SECONDS)

    def _broke(self) -> None:
        self.session = None

    @property
    def _where(self) -> str:
        return str(httpx2.URL(self._endpoint.url).copy_with(userinfo=b""))

    async def _run(self, ready: asyncio.Future[tuple[ClientSession, types.InitializeResult]]) -> None:
        try:
            async with (
                self._transport() as (reader, writer),
                ClientSession(_Watched(reader, self._broke), writer, client_info=CLIENT_INFO) as session,
            ):
                info = await session.initialize()
                self.session = session
                ready.set_result((session, info))
                await self._leave.wait()
        except Exception as error:  # noqa: BLE001 - whatever broke, the waiter must hear of it
            if not ready.done():
                ready.set_exception(ToolServerGone(f"cannot connect to {self._where}: {_reason(error)}"))
        finally:
            self.session = None
            if not ready.done():
                ready.set_exception(ToolServerGone(f"the connection to {self._where} was given up"))

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[tuple[Any, Any]]:
        timeout = httpx2.Timeout(_CONNECT_SECONDS, read=_READ_SECONDS)
        if self._endpoint.transport == "sse":
            async with sse_streams(self._endpoint.url, self._headers, _CONNECT_SECONDS, _READ_SECONDS) as streams:
                yield streams
            return
        async with (
            httpx2.AsyncClient(
                headers=dict(self._headers),
                timeout=timeout,
                limits=LIMITS,
                event_hooks={"response": [_plain_if_forgotten]},
            ) as http,
            streamable_http_client(self._endpoint.url, http_client=http, max_sse_event_size=MAX_EVENT_BYTES) as streams,
        ):
            yield streams


async def _plain_if_forgotten(response: httpx2.Response) -> None:
    """A 404 for a session id means that the server no longer has the session, and so did not take the request.

    Servers put errors of their own wording into the body, which the SDK would pass on in place of that meaning.
    """
    if response.status_code == 404 and "mcp-session-id" in response.request.headers:
        response.headers["content-type"] = "text/plain"


async def _call(session: ClientSession, name: str, args: dict[str, Any], attempt: str | None) -> types.CallToolResult:
    meta: Any = {ATTEMPT_META_KEY: attempt} if attempt else None
    try:
        return await session.call_tool(name, args, meta=meta)
    except MCPError as error:
        if error.code == types.INVALID_REQUEST and error.message == SESSION_UNKNOWN:
            raise _NotSent(f"the tool server has forgotten the connection: {error}") from error
        if error.code in (types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT):
            raise ToolServerGone(f"the connection to the tool server broke: {error}") from error
        raise ToolError(str(error)) from error
    except (httpx2.HTTPError, OSError) as error:
        raise ToolServerGone(f"the connection to the tool server broke: {_reason(error)}") from error
    except (RuntimeError, ValueError) as error:
        raise ToolError(f"the tool server's answer makes no sense: {error}") from error


def _reason(error: BaseException) -> str:
    """The innermost reason of a group of exceptions."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, httpx2.HTTPStatusError):
        return f"it answered {error.response.status_code}; is there a tool server at that address?"
    return str(error) or type(error).__name__


def _in_prompt(tool: types.Tool) -> bool:
    shown = (tool.meta or {}).get("include_in_prompt", getattr(tool.annotations, "include_in_prompt", True))
    return shown is not False and tool.name != CLEANUP_TOOL


def _described(tool: types.Tool) -> ToolDescription:
    read_only = bool(tool.annotations and tool.annotations.read_only_hint)
    return ToolDescription(tool.name, tool.description or "", dict(tool.input_schema), read_only)
