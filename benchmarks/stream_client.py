"""One kept-alive HTTP connection that streams answers: when the first text came, and everything that came.

Only for benchmarks: it trusts the server, and reads chunked answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Streamed:
    """`first_s`: from the request until the first text, in seconds. `events`: the data of each, `[DONE]` left out."""

    first_s: float
    events: list[dict[str, Any]]


class StreamClient:
    """`path` is that of one endpoint; `mark` are bytes that only events with text have."""

    def __init__(self, port: int, path: str, mark: bytes) -> None:
        self._port, self._path, self._mark = port, path, mark
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):  # the server may have closed first
                await self._writer.wait_closed()
        self._reader = self._writer = None

    async def post(self, body: Mapping[str, Any]) -> Streamed:
        """Raises RuntimeError for another answer than a whole stream with text."""
        data = json.dumps(dict(body)).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        if self._reader is None or self._writer is None or self._reader.at_eof():
            await self.close()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        began = time.perf_counter()
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.split(b"\r\n", 1)[0] or b"chunked" not in answer.lower():
            raise RuntimeError(answer.decode() + (await self._reader.read(500)).decode())
        first, received = 0.0, bytearray()
        while not received.endswith(LAST_CHUNK):
            piece = await self._reader.read(1 << 16)
            if not piece:
                raise RuntimeError(f"the stream was cut after {len(received)} bytes")
            received += piece
            if not first and self._mark in received:
                first = time.perf_counter() - began
        content = _unchunked(bytes(received))
        if not first or not content.endswith(DONE):
            raise RuntimeError(f"not a whole stream with text: {content[content.rfind(b'error') :][:300]!r}")
        return Streamed(first, [json.loads(line[6:]) for line in content.split(b"\n") if line[:7] == b"data: {"])


def _unchunked(data: bytes) -> bytes:
    parts, place = [], 0
    while True:
        end = data.index(b"\r\n", place)
        size = int(data[place:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        place = end + 2 + size + 2
