"""MCP over standard input and output, for desktop clients: one session a process.

Above: the `stdio` command. Below: `mcp_server`, the SDK.
"""

from __future__ import annotations

import asyncio
import secrets

from mcp.server.lowlevel.server import Server
from mcp.server.runner import serve_dual_era_loop
from mcp.server.stdio import stdio_server
from mcp.shared._stream_protocols import ReadStream
from mcp.shared.message import ServerMessageMetadata, SessionMessage

from sandboxes.spec import KeyKind, Retention, SessionKey, SessionRequest
from toolhost.auth import ANONYMOUS
from toolhost.mcp_server import Caller
from toolhost.transport.asgi import Attach
from toolhost.transport.streams import Inbox


async def serve_stdio(server: Server[None], *, attach: Attach, max_calls: int) -> None:
    """Serves the client at this process's standard input until that ends; then the session ends too."""
    key = SessionKey(ANONYMOUS.name, KeyKind.CONNECTION, secrets.token_hex(16))
    attachment = attach(SessionRequest(key, Retention.CONNECTION))
    metadata = ServerMessageMetadata(request_context=Caller(attachment, rich=True, max_calls=max_calls))
    inbox = Inbox()
    try:
        async with stdio_server() as (read, write):
            pump = asyncio.create_task(_pump(read, inbox, metadata))
            try:
                await serve_dual_era_loop(server, inbox, write, lifespan_state=None)
            finally:
                pump.cancel()
    finally:
        await attachment.gone()


async def _pump(read: ReadStream[SessionMessage | Exception], inbox: Inbox, metadata: ServerMessageMetadata) -> None:
    try:
        async for item in read:
            if isinstance(item, SessionMessage):  # what is not JSON-RPC the SDK has answered in its log
                inbox.put(SessionMessage(item.message, metadata=metadata))
    finally:
        inbox.close()
