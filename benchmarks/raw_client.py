"""An MCP SSE client of two sockets and no SDK: what it measures is the server.

Only for benchmarks: it trusts the server, and speaks just initialize, tools/list and tools/call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

PROTOCOL = "2025-06-18"


class RawClient:
    """One SSE connection and one kept-alive connection for its POSTs."""

    def __init__(self, host: str, port: int, path: str, headers: Mapping[str, str] | None = None) -> None:
        self._host, self._port, self._path = host, port, path
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._next = 0

    async def connect(self) -> dict[str, Any]:
        """Opens the stream, initializes; returns the server's `initialize` result."""
        self._events, self._get = await asyncio.open_connection(self._host, self._port, limit=64 << 20)
        request = f"GET {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nAccept: text/event-stream\r\n"
        self._get.write(f"{request}{self._headers}\r\n".encode())
        head = await self._events.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError(head.decode())
        self._chunked = b"transfer-encoding: chunked" in head.lower()
        self._buffer = b""
        self._endpoint = (await self._event())[1]
        self._answers, self._post = await asyncio.open_connection(self._host, self._port)
        hello = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "raw", "version": "1"},
        }
        result = await self.request("initialize", hello)
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return result

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool; returns the first text block. Raises RuntimeError on a JSON-RPC error."""
        result = await self.request("tools/call", {"name": tool, "arguments": dict(arguments)})
        return str(result["content"][0]["text"])

    async def request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self._next += 1
        number = self._next
        await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)})
        while True:
            kind, data = await self._event()
            if kind != "message":
                continue
            message = json.loads(data)
            if message.get("id") != number:
                continue
            if "error" in message:
                raise RuntimeError(message["error"])
            result: dict[str, Any] = message["result"]
            return result

    async def close(self) -> None:
        for writer in (self._get, self._post):
            writer.close()
            with contextlib.suppress(OSError):  # the server may have closed first
                await writer.wait_closed()

    async def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        head = (
            f"POST {self._endpoint} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{self._headers}\r\n"
        )
        if self._answers.at_eof():  # the server closes a connection that was quiet for some seconds
            self._post.close()
            self._answers, self._post = await asyncio.open_connection(self._host, self._port)
        self._post.write(head.encode() + body)
        answer = await self._answers.readuntil(b"\r\n\r\n")
        if b" 202 " not in answer.split(b"\r\n", 1)[0]:
            raise RuntimeError(answer.decode())
        for line in answer.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await self._answers.readexactly(int(line.split(b":")[1]))

    async def _event(self) -> tuple[str, str]:
        """The next event that is not a comment."""
        while True:
            self._buffer = self._buffer.replace(b"\r\n", b"\n")
            block, found, rest = self._buffer.partition(b"\n\n")
            if not found:
                self._buffer += await self._piece()
                continue
            self._buffer = rest
            kind, data = "message", []
            for line in block.decode().split("\n"):
                field, _, value = line.partition(":")
                if field == "event":
                    kind = value.strip()
                elif field == "data":
                    data.append(value.removeprefix(" "))
            if data:
                return kind, "\n".join(data)

    async def _piece(self) -> bytes:
        if not self._chunked:
            piece = await self._events.read(1 << 16)
        else:
            size = int((await self._events.readline()).strip() or b"0", 16)
            piece = await self._events.readexactly(size)
            await self._events.readexactly(2)
        if not piece:
            raise ConnectionError("the server closed the event stream")
        return piece
