"""A small client that shows the bytes: a GET that stays open and POSTs beside it, over plain sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

PATIENCE_S = 60.0  # a machine that does much else takes long to start a sandbox


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> Any:
        return json.loads(self.body)


async def request(
    port: int,
    path: str,
    *,
    method: str = "GET",
    body: bytes = b"",
    headers: list[tuple[str, str]] | None = None,
    host: str = "127.0.0.1",
) -> Answer:
    """One request on a connection of its own."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(_head(method, path, host, port, [*(headers or []), ("Content-Length", str(len(body)))]) + body)
            await writer.drain()
            status, received = await _read_head(reader)
            length = next((int(value) for name, value in received if name == "content-length"), None)
            if length is not None:
                content = await reader.readexactly(length)
            else:
                content = b"".join([piece async for piece in _chunks(reader)])
            return Answer(status, received, content)
        finally:
            writer.close()


@dataclass
class Stream:
    """An open SSE connection. `raw` is every byte of its body so far."""

    port: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int
    headers: list[tuple[str, str]]
    host: str
    sent_headers: list[tuple[str, str]]
    raw: bytes = b""
    endpoint: str = ""
    _buffer: bytes = b""
    _ids: int = 0
    comments: list[bytes] = field(default_factory=list)

    @classmethod
    async def open(
        cls, port: int, path: str = "/sse", headers: list[tuple[str, str]] | None = None, host: str | None = None
    ) -> Self:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                sent = headers or []
                writer.write(_head("GET", path, host or f"127.0.0.1:{port}", None, sent))
                status, received = await _read_head(reader)
                stream = cls(port, reader, writer, status, received, host or f"127.0.0.1:{port}", sent)
                if status == 200:
                    event, data = await stream.event()
                    assert event == "endpoint"
                    stream.endpoint = data
                return stream
            except BaseException:
                writer.close()
                raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_details: object) -> None:
        self.close()

    def close(self) -> None:
        self.writer.close()

    async def event(self) -> tuple[str, str]:
        """The next event; comments are kept aside. Raises EOFError when the stream has ended."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while b"\r\n\r\n" not in self._buffer:
                    await self._chunk()
                block, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
                if block.startswith(b":"):
                    self.comments.append(block)
                    continue
                fields = dict(line.split(b": ", 1) for line in block.split(b"\r\n"))
                return fields[b"event"].decode(), fields[b"data"].decode()

    async def comment(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            while not self._buffer.startswith(b":") or b"\r\n\r\n" not in self._buffer:
                await self._chunk()
        block, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return block

    async def ended(self) -> None:
        """Waits until the server has ended the stream."""
        try:
            while True:
                await self.event()
        except EOFError:
            return

    async def message(self) -> dict[str, Any]:
        _, data = await self.event()
        found: dict[str, Any] = json.loads(data)
        return found

    async def post(self, body: bytes, headers: list[tuple[str, str]] | None = None) -> Answer:
        return await request(
            self.port,
            self.endpoint,
            method="POST",
            body=body,
            host=self.host.rsplit(":", 1)[0],
            headers=[("Content-Type", "application/json"), *(self.sent_headers if headers is None else headers)],
        )

    async def call(self, method: str, params: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Sends a request and waits for the answer of its id."""
        ident = await self.send(method, params, **more)
        while True:
            message = await self.message()
            if message.get("id") == ident:
                return message

    async def send(self, method: str, params: dict[str, Any] | None = None, **more: Any) -> int:
        self._ids += 1
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": self._ids, "method": method}
        if params is not None:
            message["params"] = params
        answer = await self.post(json.dumps(message).encode(), **more)
        assert answer.status == 202, answer
        return self._ids

    async def initialize(self) -> dict[str, Any]:
        answer = await self.call(
            "initialize",
            {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "raw", "version": "0"}},
        )
        await self.post(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        return answer

    async def tool(self, name: str, arguments: Any = None, meta: dict[str, Any] | None = None, **more: Any) -> Any:
        """Calls a tool; the result."""
        params: dict[str, Any] = {"name": name}
        if arguments is not None:
            params["arguments"] = arguments
        if meta is not None:
            params["_meta"] = meta
        answer = await self.call("tools/call", params, **more)
        return answer["result"]

    async def python(self, code: str, **more: Any) -> str:
        """Runs code; the text of the result."""
        result = await self.tool("python", {"code": code}, **more)
        return str(result["content"][0]["text"])

    async def _chunk(self) -> None:
        line = await self.reader.readline()
        size = int(line, 16) if line.strip() else 0
        data = await self.reader.readexactly(size + 2) if size else b""
        if not size:
            raise EOFError
        self.raw += data[:-2]
        self._buffer += data[:-2]


def _head(method: str, path: str, host: str, port: int | None, headers: list[tuple[str, str]]) -> bytes:
    name = host if port is None else f"{host}:{port}"
    lines = [f"{method} {path} HTTP/1.1", f"Host: {name}", *(f"{key}: {value}" for key, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).strip() or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, list[tuple[str, str]]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    pairs = [line.split(":", 1) for line in head[1:] if line]
    return status, [(name.strip().lower(), value.strip()) for name, value in pairs]
