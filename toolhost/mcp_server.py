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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mcp.server.context import CallNext, HandlerResult, ServerMiddleware, ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_REQUEST, CallToolResult, ListToolsResult
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from sandboxes.errors import SandboxError
from toolhost import __version__
from toolhost.errors import UNEXPECTED, BadArguments, row, text_for
from toolhost.identity import NOT_NARROWED, Domains, label
from toolhost.namespaces.base import CallContext, Namespace, SessionAttachment, Tool, ToolResult

log = logging.getLogger("toolhost.calls")

PROMPT_FLAG = "include_in_prompt"
ATTEMPTS = "toolhost/attempts"  # says that a call with an attempt id may be sent again
CALLER = "toolhost.caller"  # its place in an ASGI scope
TOOL_NAME = re.compile(r"\s*([A-Za-z0-9_-]*)")  # models add junk behind a name: a space, `<|channel|>…`

Context = ServerRequestContext[Any, Any]


@dataclass(slots=True)
class Caller:
    """What a connection brings to its calls; transports hand it to the SDK as the request's context.

    `attachment` is None when the connection cannot use a session; `refusal` then says why. `max_calls`: in flight.
    """

    attachment: SessionAttachment | None
    refusal: str = ""
    rich: bool = False
    max_calls: int = 32
    calls: int = 0
    domains: Domains = NOT_NARROWED

    def refusing(self, reason: str) -> Caller:
        """The same connection, for one message whose call must not run."""
        return Caller(None, reason, self.rich)


def create_server(namespaces: Sequence[Namespace], *, name: str, instructions: str) -> Server[None]:
    """An MCP server of that name with the tools of these namespaces (the first that has a tool's name serves it)."""
    tools = ToolSet(namespaces)

    async def list_tools(_context: Context, _params: object) -> ListToolsResult:
        return ListToolsResult.model_validate(tools.listing)

    async def call_tool(context: Context, _params: object) -> CallToolResult:
        return CallToolResult.model_validate(await tools.call(context))

    server: Server[None] = cast(
        "Server[None]",
        Server(name, version=__version__, instructions=instructions, on_list_tools=list_tools, on_call_tool=call_tool),
    )
    server.middleware[:] = [cast("ServerMiddleware[None]", tools)]
    return server


class ToolSet:
    """The tools of one server: the listing, and the way from a call to its namespace and back to the wire."""

    def __init__(self, namespaces: Sequence[Namespace]) -> None:
        self._owners: dict[str, Namespace] = {}
        listed: list[dict[str, Any]] = []
        for namespace in namespaces:
            for tool in namespace.tools:
                if tool.name not in self._owners:
                    self._owners[tool.name] = namespace
                    listed.append(tool_on_wire(tool))
        self._flags = {tool["name"]: tool for tool in listed}
        self.listing: dict[str, Any] = {"tools": listed}

    async def __call__(self, context: Context, call_next: CallNext) -> HandlerResult:
        """The middleware: see the module's text."""
        method = context.method
        if method not in ("tools/list", "tools/call"):
            return await call_next(context)
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
        """A call's result on the wire. Never raises but for cancellation: every failure is text for the model."""
        caller = _caller_of(context)
        params = context.params or {}
        name = params.get("name")
        started = time.monotonic()
        result = await self._answer(caller, name, params)
        self._log(caller, name, result, time.monotonic() - started)
        return result_on_wire(result, rich=caller is not None and caller.rich)

    async def _answer(self, caller: Caller | None, name: object, params: Mapping[str, Any]) -> ToolResult:
        if caller is None or caller.attachment is None:
            return ToolResult(f"Error: {caller.refusal if caller else 'this request has no session.'}", is_error=True)
        if caller.calls >= caller.max_calls:
            return ToolResult(
                f"Error: {caller.calls} calls are in flight on this connection already. Nothing ran. Wait for one.",
                is_error=True,
            )
        caller.calls += 1
        try:
            namespace, tool = self._find(name)
            arguments, meta = _mapping(params, "arguments"), _mapping(params, "_meta")
            around = CallContext(caller.attachment, meta, caller.rich, domains=caller.domains)
            return await namespace.call(tool, arguments, around)
        except (SandboxError, BadArguments) as error:
            return ToolResult(text_for(error), is_error=True, meta={"toolhost/error": row(error).code})
        except Exception as error:
            log.exception("a call failed for a reason that is not in the table of errors")
            return ToolResult(text_for(error), is_error=True, meta={"toolhost/error": UNEXPECTED.code})
        finally:
            caller.calls -= 1

    def _find(self, name: object) -> tuple[Namespace, str]:
        if isinstance(name, str) and (match := TOOL_NAME.match(name)):
            tool = match[1]
            if tool in self._owners:
                return self._owners[tool], tool
        known = ", ".join(name for name, tool in self._flags.items() if name != "cleanup_session")
        shown = f" {name[:80]!r}" if isinstance(name, str) and name else ""
        raise BadArguments(f"There is no tool{shown} here. Tools: {known}. Nothing ran.")

    def _namespace_of(self, name: object) -> str | None:
        try:
            return self._find(name)[0].name
        except BadArguments:
            return None

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
    if not isinstance(found, Caller):
        found = getattr(found, "scope", {}).get(CALLER)
    return found if isinstance(found, Caller) else None


def _mapping(params: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = params.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadArguments(f'"{name}" of a tool call must be a JSON object, not {type(value).__name__}. Nothing ran.')
    return value
