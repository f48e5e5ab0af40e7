"""Partial output, for clients that ask for it with a progress token: MCP progress notifications while code runs.

Above: `mcp_server`. Below: sandboxes' events. Best effort: the result has the whole output in any case. The protocol:
https://modelcontextprotocol.io/specification/2025-06-18/basic/utilities/progress
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from sandboxes.events import ExecutionEvent, Printed

PAUSE_S = 0.05  # between two notifications: what is printed meanwhile goes in one
WAITING_CHARACTERS = 100_000  # beyond this a client that reads slowly misses some
LAST_S = 2.0  # for the last notification, before the result goes out

Send = Callable[[float, float | None, str | None], Awaitable[None]]


class Progress:
    """A listener for one call's events, while it is entered. `send` takes the progress, a total and a message.

    The progress is the number of characters so far, so it grows with each notification; the message is the new text.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting = ""
        self._sent = 0
        self._wake = asyncio.Event()
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def __call__(self, event: ExecutionEvent) -> None:
        if isinstance(event, Printed) and len(self._waiting) < WAITING_CHARACTERS:
            self._waiting += event.text
            self._wake.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="progress")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_S):
                        await self._flush()  # and only then ends the task: what it is sending would be lost with it
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await self._flush()
            await asyncio.sleep(PAUSE_S)

    async def _flush(self) -> None:
        """Returns once everything so far is sent, by whomever. A client that is gone is the transport's to notice: its
        call is cancelled."""
        async with self._sending:
            self._wake.clear()
            text, self._waiting = self._waiting, ""
            if text:
                self._sent += len(text)
                with contextlib.suppress(OSError, RuntimeError):
                    await self._send(float(self._sent), None, text.encode("utf-8", "replace").decode("utf-8"))
