"""The two streams of a connection as the SDK wants them, without its queues: what is posted in, what is sent out.

Above: `sse`. Below: the SDK's stream protocols.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from mcp.shared.message import SessionMessage
from mcp_types import ErrorData, JSONRPCError
from pydantic_core import to_json

from toolhost.transport.asgi import Send

EVENT = b"event: message\r\ndata: %b\r\n\r\n"
PING = b": ping\r\n\r\n"


class Inbox:
    """Messages from the client, in order. Ends when closed; what was not read by then is dropped."""

    def __init__(self) -> None:
        self._items: deque[tuple[SessionMessage, int]] = deque()
        self._ready = asyncio.Event()
        self.closed = False
        self.waiting_bytes = 0

    @property
    def waiting(self) -> int:
        """Messages that the server has not taken yet."""
        return len(self._items)

    def put(self, item: SessionMessage, size: int = 0) -> None:
        """`size`: bytes of the message, for `waiting_bytes`."""
        if not self.closed:
            self._items.append((item, size))
            self.waiting_bytes += size
            self._ready.set()

    def close(self) -> None:
        self.closed = True
        self._items.clear()
        self.waiting_bytes = 0
        self._ready.set()

    async def receive(self) -> SessionMessage:
        return await self.__anext__()

    async def aclose(self) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage:
        while not self._items:
            if self.closed:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        item, size = self._items.popleft()
        self.waiting_bytes -= size
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Outbox:
    """Messages to the client: each becomes one event and one write."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.closed = False
        self.waiting = 0  # messages that wait until the client reads
        self.waiting_bytes = 0

    async def send(self, item: SessionMessage, /) -> None:
        await self.write(EVENT % item.message.model_dump_json(by_alias=True, exclude_unset=True).encode())

    async def send_error(self, ident: str | int | None, code: int, message: str) -> None:
        """A JSON-RPC error of the host's own; without an id when the request's is not known."""
        error = JSONRPCError(jsonrpc="2.0", id=ident, error=ErrorData(code=code, message=message))
        await self.write(EVENT % error.model_dump_json(by_alias=True, exclude_unset=True).encode())

    async def send_result(self, ident: str | int, result: Mapping[str, Any]) -> None:
        """The answer to a request, as the SDK's models would write it."""
        await self.write(EVENT % _json({"jsonrpc": "2.0", "id": ident, "result": result}))

    async def send_notification(self, method: str, params: Mapping[str, Any]) -> None:
        await self.write(EVENT % _json({"jsonrpc": "2.0", "method": method, "params": params}))

    async def write(self, data: bytes) -> None:
        if self.closed:
            return
        self.waiting += 1
        self.waiting_bytes += len(data)
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self.waiting -= 1
            self.waiting_bytes -= len(data)

    async def aclose(self) -> None:
        # The SDK closes the stream when its loop ends; the transport ends the response itself.
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_details: Any) -> None:
        return None


def _json(message: Mapping[str, Any]) -> bytes:
    return to_json(message, inf_nan_mode="null")  # what a model of the SDK does with them
