"""MCP over standard input and output, for desktop clients: one session a process.

Above: the `stdio` command. Below: `mcp_server`, `jsonid`, the SDK.
"""

from __future__ import annotations

import asyncio
import secrets

from mcp.server.lowlevel.server import Server
from mcp.server.runner import serve_dual_era_loop
from mcp.server.stdio import stdio_server
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp.types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError, JSONRPCNotification
from pydantic import ValidationError

from sandboxes.spec import KeyKind, Retention, SessionKey, SessionRequest
from toolhost.auth import ANONYMOUS
from toolhost.mcp_server import Caller
from toolhost.transport.asgi import Attach
from toolhost.transport.jsonid import can_be_answered, find_id, has_half_characters
from toolhost.transport.streams import Inbox

NOTIFICATIONS = "notifications/"  # how the names of all of them begin, in every version of MCP


async def serve_stdio(server: Server[None], *, attach: Attach, max_calls: int) -> None:
    """Serves the client at this process's standard input until that ends; then the session ends too."""
    key = SessionKey(ANONYMOUS.name, KeyKind.CONNECTION, secrets.token_hex(16))
    attachment = attach(SessionRequest(key, Retention.CONNECTION))
    metadata = ServerMessageMetadata(request_context=Caller(attachment, rich=True, max_calls=max_calls))
    inbox = Inbox()
    try:
        async with stdio_server() as (read, write):
            pump = asyncio.create_task(_pump(read, write, inbox, metadata))
            try:
                await serve_dual_era_loop(server, inbox, write, lifespan_state=None)
            finally:
                pump.cancel()
    finally:
        await attachment.gone()


async def _pump(
    read: ReadStream[SessionMessage | Exception],
    write: WriteStream[SessionMessage],
    inbox: Inbox,
    metadata: ServerMessageMetadata,
) -> None:
    try:
        async for item in read:
            if isinstance(item, Exception):
                await write.send(_error(*_fault(item), _id_of(item)))
            elif isinstance(item.message, JSONRPCNotification) and not item.message.method.startswith(NOTIFICATIONS):
                # No client notifies of these: it is a request, and its id is none, or missing.
                await write.send(_error(INVALID_REQUEST, "The id must be a string or an integer. Nothing ran."))
            else:
                inbox.put(SessionMessage(item.message, metadata=metadata))
    finally:
        inbox.close()


def _fault(error: Exception) -> tuple[int, str]:
    """What is wrong with a line, as code and text."""
    found = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
    if found is not None and found["type"] != "json_invalid":
        return INVALID_REQUEST, "The line is not a JSON-RPC 2.0 message. Nothing ran."
    if found is not None and has_half_characters(str(found["input"])):
        return PARSE_ERROR, "The line has half of a surrogate pair, which is no character. Nothing ran."
    return PARSE_ERROR, "The line is not valid JSON. Nothing ran."


def _id_of(error: Exception) -> str | int | None:
    """The id of the message that could not be read: without it, whoever sent it would wait for ever."""
    for one in error.errors(include_url=False) if isinstance(error, ValidationError) else ():
        given = one["input"]
        if one["type"] == "json_invalid":
            return find_id(str(given).encode())
        if one["type"] == "missing" and isinstance(given, dict) and can_be_answered(given.get("id")):
            ident: str | int = given["id"]
            return ident
    return None


def _error(code: int, message: str, ident: str | int | None = None) -> SessionMessage:
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=ident, error=ErrorData(code=code, message=message)))
