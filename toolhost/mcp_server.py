"""A namespace → an MCP server object of the SDK, with what the SDK would drop or slow down put right.

Above: transports. Below: namespaces, `errors`, the `mcp` SDK.

Tools are listed and called from a middleware of the SDK's server, the one place where a result goes out as it is: the
models of the SDK drop unknown keys of annotations (`include_in_prompt`), and validate each result twice. Requests of
the 2026-07-28 protocol take the SDK's whole path, because it adds to results, and get the flags afterwards.
"""

from __future__ import annotations

import base64
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from mcp.server.context import CallNext, HandlerResult, ServerMiddleware, ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    CallToolResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    ReadResourceRequestParams,
    ReadResourceResult,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from sandboxes.errors import SandboxError
from sandboxes.spec import SessionKey
from toolhost import __version__
from toolhost.errors import UNEXPECTED, BadArguments, row, text_for
from toolhost.identity import NOT_NARROWED, Domains, label
from toolhost.namespaces import resources
from toolhost.namespaces.base import CLEANUP, CallContext, Namespace, SessionAttachment, Tool, ToolResult
from toolhost.namespaces.prompts import all_instructions
from toolhost.namespaces.resources import Files
from toolhost.progress import Progress, Send
from toolhost.tracing import Traces, context_of

log = logging.getLogger("toolhost.calls")

PROGRESS_TOKEN = "progressToken"  # in a call's `_meta`
PROMPT_FLAG = "include_in_prompt"
ATTEMPTS = "toolhost/attempts"  # says that a call with an attempt id may be sent again
CALLER = "toolhost.caller"  # its place in an ASGI scope
TOOL_NAME = re.compile(r"\s*([A-Za-z0-9_-]*)")  # models add junk behind a name: a space, `<|channel|>…`

Context = ServerRequestContext[Any, Any]


@dataclass(slots=True)
class Caller:
    """What a connection brings to its calls; transports hand it to the SDK as the request's context.

    `attachment` is None when the connection cannot use a session; `refusal` then says why. `max_calls`: in flight.
    `protocol`: the version that `initialize` has agreed on, "" before.
    """

    attachment: SessionAttachment | None
    refusal: str = ""
    rich: bool = False
    max_calls: int = 32
    calls: int = 0
    domains: Domains = NOT_NARROWED
    protocol: str = ""

    def refusing(self, reason: str) -> Caller:
        """The same connection, for one message whose call must not run."""
        return Caller(None, reason, self.rich)


@dataclass(frozen=True, slots=True)
class Traced:
    """A caller, with what the request of one message says of the trace that it is part of."""

    caller: Caller
    trace: Mapping[str, str]


FilesOf = Callable[[SessionKey], Files]


@dataclass(frozen=True, slots=True)
class Served:
    """A tool as a server shows it, and what answers its calls. One that is not listed can be called all the same."""

    namespace: Namespace
    name: str  # in its namespace
    shown: Tool
    listed: bool = True


def create_server(namespace: Namespace, *, files: FilesOf, traces: Traces | None = None) -> Server[None]:
    """The MCP server of one namespace, named after it."""
    served = [Served(namespace, tool.name, tool) for tool in namespace.tools]
    return _server(served, files, traces, name=namespace.name, instructions=namespace.instructions)


def create_aggregate(namespaces: Sequence[Namespace], *, files: FilesOf, traces: Traces | None = None) -> Server[None]:
    """One MCP server, `toolhost`, with every namespace's tools, for clients that people and agent frameworks use.

    A tool's name begins with its namespace, so that it collides with no other tool of a client that has many servers.
    `cleanup_session` is not listed: a model that these clients show it to would end its own session.
    """
    served = [
        Served(namespace, tool.name, replace(tool, name=aggregate_name(namespace, tool)), tool is not CLEANUP)
        for namespace in namespaces
        for tool in namespace.tools
    ]
    instructions = all_instructions([one.shown for one in served if one.listed])
    return _server(served, files, traces, name="toolhost", instructions=instructions)


def aggregate_name(namespace: Namespace, tool: Tool) -> str:
    """What a tool of a namespace is called where all of them are together."""
    if tool is CLEANUP or tool.name == namespace.name:
        return tool.name
    return f"{namespace.name}_{tool.name}"


def _server(
    served: Sequence[Served], files: FilesOf, traces: Traces | None, *, name: str, instructions: str
) -> Server[None]:
    tools = ToolSet(served, traces)
    shelf = Shelf(files)

    async def list_tools(_context: Context, _params: object) -> ListToolsResult:
        return ListToolsResult.model_validate(tools.listing)

    async def call_tool(context: Context, _params: object) -> CallToolResult:
        return CallToolResult.model_validate(await tools.call(context))

    server: Server[None] = cast(
        "Server[None]",
        Server(
            name,
            version=__version__,
            instructions=instructions,
            on_list_tools=list_tools,
            on_call_tool=call_tool,
            on_list_resources=shelf.list,
            on_list_resource_templates=shelf.templates,
            on_read_resource=shelf.read,
        ),
    )
    server.middleware[:] = [cast("ServerMiddleware[None]", tools)]
    return server


def tools_of(server: Server[None]) -> ToolSet:
    """The tools of a server that was made here."""
    (tools,) = server.middleware
    return cast("ToolSet", tools)


class Shelf:
    """The files of a request's session as resources. What is wrong is a JSON-RPC error: no model reads these."""

    def __init__(self, files: FilesOf) -> None:
        self._files = files

    async def list(self, context: Context, _params: object) -> ListResourcesResult:
        try:
            found = await resources.listing(self._of(context))
        except SandboxError as error:
            raise MCPError(code=INVALID_REQUEST, message=text_for(error)) from None
        return ListResourcesResult.model_validate({"resources": found})

    async def templates(self, _context: Context, _params: object) -> ListResourceTemplatesResult:
        return ListResourceTemplatesResult.model_validate({"resourceTemplates": [resources.TEMPLATE]})

    async def read(self, context: Context, params: ReadResourceRequestParams) -> ReadResourceResult:
        try:
            contents = await resources.read(self._of(context), str(params.uri))
        except (BadArguments, SandboxError) as error:
            raise MCPError(code=INVALID_PARAMS, message=text_for(error), data={"uri": str(params.uri)}) from None
        return ReadResourceResult.model_validate({"contents": contents})

    def _of(self, context: Context) -> Files:
        caller = _caller_of(context)
        if caller is None or caller.attachment is None:
            raise MCPError(code=INVALID_REQUEST, message=caller.refusal if caller else "this request has no session")
        return self._files(caller.attachment.key)


class ToolSet:
    """The tools of one server: the listing, and the way from a call to its namespace and back to the wire."""

    def __init__(self, served: Sequence[Served], traces: Traces | None = None) -> None:
        self._traces = traces
        self._served: dict[str, Served] = {}
        for one in served:
            self._served.setdefault(one.shown.name, one)
        listed = [tool_on_wire(one.shown) for one in self._served.values() if one.listed]
        names = {one.namespace.name for one in served}
        self._only = names.pop() if len(names) == 1 else None
        self._flags = {tool["name"]: tool for tool in listed}
        self.listing: dict[str, Any] = {"tools": listed}

    async def __call__(self, context: Context, call_next: CallNext) -> HandlerResult:
        """The middleware: see the module's text."""
        method = context.method
        if method not in ("tools/list", "tools/call"):
            result = await call_next(context)
            if method == "initialize" and isinstance(result, dict) and (caller := _caller_of(context)) is not None:
                caller.protocol = str(result.get("protocolVersion", ""))
            return result
        if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
            result = await call_next(context)
            return self._flagged(result) if method == "tools/list" else result
        if context.session.client_params is None:
            raise MCPError(
                code=INVALID_REQUEST,
                message=f"{method} came before initialization. Send `initialize` on this connection first; after a "
                "restart of the host open a new connection (the same session id finds its session).",
            )
        return self.listing if method == "tools/list" else await self.call(context)

    async def call(self, context: Context) -> dict[str, Any]:
        """See `answer`."""
        trace = _trace_of(context) if self.traced else {}
        return await self.answer(_caller_of(context), context.params or {}, context.session.report_progress, trace)

    @property
    def traced(self) -> bool:
        """Whether calls become spans."""
        return self._traces is not None

    async def answer(
        self, caller: Caller | None, params: Mapping[str, Any], report: Send, trace: Mapping[str, str]
    ) -> dict[str, Any]:
        """A call's result on the wire. Never raises but for cancellation: every failure is text for the model.

        `report`: sends progress, if the call asks for it. `trace`: what its request says of the trace it is part of.
        """
        name = params.get("name")
        started = time.monotonic()
        if self._traces is None:
            result = await self._answer(caller, name, params, report)
        else:
            result = await self._spanned(self._traces, caller, params, report, trace)
        self._log(caller, name, result, time.monotonic() - started)
        return result_on_wire(result, rich=caller is not None and caller.rich)

    async def _spanned(
        self,
        traces: Traces,
        caller: Caller | None,
        params: Mapping[str, Any],
        report: Send,
        trace: Mapping[str, str],
    ) -> ToolResult:
        name, meta = params.get("name"), params.get("_meta")
        known = name if isinstance(name, str) and name in self._served else "unknown"  # the rest is the client's text
        with traces.call(known, meta if isinstance(meta, Mapping) else {}, trace) as span:
            result = await self._answer(caller, name, params, report)
            attachment = caller.attachment if caller is not None else None
            error = result.meta.get("toolhost/error", "refused") if result.is_error else None
            traces.answered(span, attachment.key if attachment is not None else None, error)
        return result

    async def _answer(self, caller: Caller | None, name: object, params: Mapping[str, Any], report: Send) -> ToolResult:
        if caller is None or caller.attachment is None:
            return ToolResult(f"Error: {caller.refusal if caller else 'this request has no session.'}", is_error=True)
        if caller.calls >= caller.max_calls:
            return ToolResult(
                f"Error: {caller.calls} calls are in flight on this connection already. Nothing ran. Wait for one.",
                is_error=True,
            )
        caller.calls += 1
        try:
            served = self._find(name)
            arguments, meta = _mapping(params, "arguments"), _mapping(params, "_meta")
            around = CallContext(caller.attachment, meta, caller.rich, domains=caller.domains)
            if PROGRESS_TOKEN not in meta:
                return await served.namespace.call(served.name, arguments, around)
            async with Progress(report) as progress:
                return await served.namespace.call(served.name, arguments, replace(around, on_event=progress))
        except (SandboxError, BadArguments) as error:
            if row(error).status >= 500:
                log.warning("a call could not be served: %s", error.message)
            return ToolResult(text_for(error), is_error=True, meta={"toolhost/error": row(error).code})
        except Exception as error:
            log.exception("a call failed for a reason that is not in the table of errors")
            return ToolResult(text_for(error), is_error=True, meta={"toolhost/error": UNEXPECTED.code})
        finally:
            caller.calls -= 1

    def _find(self, name: object) -> Served:
        if isinstance(name, str) and (match := TOOL_NAME.match(name)) and match[1] in self._served:
            return self._served[match[1]]
        known = ", ".join(name for name in self._flags if name != CLEANUP.name)
        shown = f" {name[:80]!r}" if isinstance(name, str) and name else ""
        raise BadArguments(f"There is no tool{shown} here. Tools: {known}. Nothing ran.")

    def _namespace_of(self, name: object) -> str | None:
        try:
            return self._find(name).namespace.name
        except BadArguments:
            return self._only  # a server of one namespace is what the client spoke to

    def _flagged(self, result: HandlerResult) -> HandlerResult:
        if isinstance(result, dict):
            for tool in result.get("tools", ()):
                ours = self._flags.get(tool.get("name"))
                if ours is not None and "_meta" in ours:
                    tool["_meta"] = {**tool.get("_meta", {}), **ours["_meta"]}
                    tool["annotations"] = {**tool.get("annotations", {}), **ours["annotations"]}
        return result

    def _log(self, caller: Caller | None, name: object, result: ToolResult, seconds: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        receipt = result.meta.get("toolhost/receipt", {})
        attachment = caller.attachment if caller else None
        log.info(
            "call",
            extra={
                "fields": {
                    "session": label(attachment.key) if attachment else None,
                    "namespace": self._namespace_of(name),
                    "tool": str(name)[:64],
                    "attempt": receipt.get("attempt_id"),
                    "epoch": receipt.get("epoch"),
                    "sequence": receipt.get("sequence"),
                    "ending": receipt.get("ending"),
                    "state": receipt.get("state"),
                    "error": result.meta.get("toolhost/error"),
                    "ms": round(seconds * 1000, 2),
                }
            },
        )


def tool_on_wire(tool: Tool) -> dict[str, Any]:
    """A tool as `tools/list` shows it. A hidden one says so twice: clients look in one place or in the other."""
    wire: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "inputSchema": dict(tool.input_schema),
        "annotations": {**({"title": tool.title} if tool.title else {}), **tool.hints},
    }
    if tool.title:
        wire["title"] = tool.title
    meta: dict[str, bool] = {}
    if tool.hidden:
        wire["annotations"][PROMPT_FLAG] = False
        meta[PROMPT_FLAG] = False
    if tool.attempts:
        meta[ATTEMPTS] = True
    if meta:
        wire["_meta"] = meta
    return wire


def result_on_wire(result: ToolResult, *, rich: bool) -> dict[str, Any]:
    """A result as `tools/call` answers it: one text block, and what a rich client takes after it."""
    content: list[dict[str, Any]] = [{"type": "text", "text": clean(result.text) or "[No output.]"}]
    wire: dict[str, Any] = {"content": content, "isError": result.is_error}
    if result.meta:
        wire["_meta"] = dict(result.meta)
    if not rich:
        return wire
    for image in result.images:
        content.append({"type": "image", "data": base64.b64encode(image.data).decode(), "mimeType": image.mime})
    for link in result.links:
        resource: dict[str, Any] = {"type": "resource_link", "uri": link.uri, "name": link.name, "mimeType": link.mime}
        content.append(resource if link.size is None else {**resource, "size": link.size})
    if result.structured is not None:
        wire["structuredContent"] = dict(result.structured)
    return wire


def clean(text: str) -> str:
    """Without lone surrogates: no JSON encoder could send them, and the client would wait for ever."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _caller_of(context: Context) -> Caller | None:
    """SSE hands the caller over as it is; the SDK's HTTP transports hand over a request, the caller in its scope."""
    found = context.request
    if isinstance(found, Traced):
        return found.caller
    if not isinstance(found, Caller):
        found = getattr(found, "scope", {}).get(CALLER)
    return found if isinstance(found, Caller) else None


def _trace_of(context: Context) -> Mapping[str, str]:
    """What the request of a message says of its trace: SSE hands it over, the SDK's HTTP transports their request."""
    found = context.request
    if isinstance(found, Traced):
        return found.trace
    return context_of(getattr(found, "scope", {}).get("headers", ()))


def _mapping(params: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = params.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadArguments(f'"{name}" of a tool call must be a JSON object, not {type(value).__name__}. Nothing ran.')
    return value
