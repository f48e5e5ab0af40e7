"""Tool calls and listings of an initialized connection, answered without the SDK's dispatcher: it costs more than all
the rest of a call.

Above: `sse`. Below: `mcp_server` (what a call answers), `streams`.

What goes out is what the SDK would send, byte for byte, and everything else takes its way: the handshake, other
methods, the 2026-07-28 protocol, and messages that are not exactly of the common form. The rules that the SDK's
dispatcher keeps hold here too (https://modelcontextprotocol.io/specification/2025-06-18/basic/utilities/cancellation):
a request that its client cancels is not answered; one that the end of the connection cuts off is answered with an
error, where there is still somebody to read it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from mcp.shared.dispatcher import as_request_id, coerce_request_id
from mcp_types import CONNECTION_CLOSED
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic_core import from_json

from toolhost.identity import Headers
from toolhost.mcp_server import PROGRESS_TOKEN, Caller, ToolSet
from toolhost.progress import Send
from toolhost.tracing import context_of
from toolhost.transport.streams import Outbox

CLOSED_S = 1.0  # for the error that says that the connection ended
REQUEST = {"jsonrpc", "id", "method", "params"}
CANCELLED = "notifications/cancelled"


class _Call:
    """One call in flight. `why`: "" while nobody ends it, "peer" or "close"."""

    __slots__ = ("task", "why")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.why = ""

    def end(self, why: str) -> None:
        if not self.why:
            self.why = why
            self.task.cancel()


class Direct:
    """Of one connection. Each call runs in the task of the POST that brought it, which has been answered by then."""

    def __init__(self, tools: ToolSet, caller: Caller, outbox: Outbox) -> None:
        self._tools = tools
        self._caller = caller
        self._outbox = outbox
        self._named: dict[str | int, _Call] = {}  # whose result is not known yet: these can be cancelled
        self._calls: set[_Call] = set()
        self._closed = False

    async def take(self, body: bytes, headers: Headers) -> bool:
        """Whether it was a message for this path. If so it has been answered when this returns, unless it came after
        the end."""
        if not self._caller.protocol or self._caller.protocol in MODERN_PROTOCOL_VERSIONS:
            return False
        try:
            message = from_json(body)
        except ValueError:
            return False
        if type(message) is not dict or message.get("jsonrpc") != "2.0":
            return False
        method, params = message.get("method"), message.get("params")
        if message.keys() == REQUEST and type(params) is dict:
            ident = message["id"]
            if type(ident) is not int and type(ident) is not str:
                return False
            if method == "tools/call":
                if not self._closed:
                    await self._call(ident, params, context_of(headers) if self._tools.traced else {})
                return True
            if method == "tools/list":
                await self._outbox.send_result(ident, self._tools.listing)
                return True
        elif method == CANCELLED and "id" not in message and type(params) is dict:
            return self._cancel(params)
        return False

    def close(self) -> None:
        """The connection ends: so does what runs for it."""
        self._closed = True
        for call in self._calls:
            call.end("close")

    async def ended(self) -> None:
        """Returns when nothing runs any more."""
        tasks = [call.task for call in self._calls if call.task is not asyncio.current_task()]
        if tasks:
            await asyncio.wait(tasks)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _cancel(self, params: Mapping[str, Any]) -> bool:
        ident = as_request_id(params.get("requestId"))
        call = None if ident is None else self._named.get(coerce_request_id(ident))
        if call is None:
            return False  # it may be one of the SDK's
        call.end("peer")
        return True

    async def _call(self, ident: str | int, params: dict[str, Any], trace: Mapping[str, str]) -> None:
        task = asyncio.current_task()
        assert task is not None
        call = _Call(task)
        key = coerce_request_id(ident)
        self._named[key] = call
        self._calls.add(call)
        answering = False
        try:
            try:
                result = await self._tools.answer(self._caller, params, self._report(params), trace)
            finally:
                if self._named.get(key) is call:
                    del self._named[key]
            answering = True
            await self._outbox.send_result(ident, result)
        except asyncio.CancelledError:
            if not call.why:
                raise  # not ours: the server ends this task
            task.uncancel()
            if call.why == "close" and not answering:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSED_S):
                        await self._outbox.send_error(ident, CONNECTION_CLOSED, "Connection closed")
        finally:
            self._calls.discard(call)

    def _report(self, params: Mapping[str, Any]) -> Send:
        """What sends a call's progress. The SDK's dispatcher too ignores a token that is neither text nor integer."""
        meta = params.get("_meta")
        token = as_request_id(meta.get(PROGRESS_TOKEN)) if type(meta) is dict else None
        if token is None:
            return _nothing

        async def report(progress: float, total: float | None, message: str | None) -> None:
            found = {"progressToken": token, "progress": progress, "total": total, "message": message}
            told = {name: value for name, value in found.items() if value is not None}
            await self._outbox.send_notification("notifications/progress", told)

        return report


async def _nothing(_progress: float, _total: float | None, _message: str | None) -> None:
    """A token that is none: nobody listens."""
