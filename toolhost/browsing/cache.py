"""Responses kept for conditional requests, and one flight for callers who want the same thing at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Response:
    """A successful answer to one URL, read whole.

    Attributes:
        url: Where it came from in the end.
        content_type: Media type in lower case, without parameters; empty when not told.
        charset: From the header, or None.
        truncated: The body was longer than the cap.
    """

    url: str
    content_type: str
    charset: str | None
    body: bytes
    truncated: bool = False
    etag: str | None = None
    last_modified: str | None = None


class ResponseCache:
    """Answers with a validator, least recently used first out.

    Args:
        max_bytes: Of bodies kept in all; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Response] = OrderedDict()
        self._bytes = 0

    def get(self, url: str) -> Response | None:
        """The answer kept for exactly this URL."""
        response = self._kept.get(url)
        if response is not None:
            self._kept.move_to_end(url)
        return response

    def put(self, url: str, response: Response) -> None:
        """Keep an answer that can be asked about again."""
        self.drop(url)
        if not (response.etag or response.last_modified) or len(response.body) > self._max_bytes:
            return
        self._kept[url] = response
        self._bytes += len(response.body)
        while self._bytes > self._max_bytes:
            self.drop(next(iter(self._kept)))

    def drop(self, url: str) -> None:
        """Forget an answer."""
        old = self._kept.pop(url, None)
        if old is not None:
            self._bytes -= len(old.body)


class SingleFlight(Generic[T]):
    """Callers with the same key share one run; it is cancelled when the last of them is."""

    def __init__(self) -> None:
        self._running: dict[Hashable, tuple[asyncio.Task[T], list[int]]] = {}

    async def run(self, key: Hashable, operation: Callable[[], Awaitable[T]]) -> T:
        """The result or the error of the run for `key`."""
        if key not in self._running:
            self._running[key] = (asyncio.ensure_future(_as_coroutine(operation)), [0])
        task, waiting = self._running[key]
        waiting[0] += 1
        try:
            return await asyncio.shield(task)
        finally:
            waiting[0] -= 1
            if task.done() or not waiting[0]:
                if self._running.get(key, (None,))[0] is task:
                    del self._running[key]
                if not task.done():
                    task.cancel()


async def _as_coroutine(operation: Callable[[], Awaitable[T]]) -> T:
    return await operation()
