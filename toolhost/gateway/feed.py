"""Following a response's events: from the process that runs it, or from the store by any other.

Above: routes. Below: the store. An entry is `TYPE JSON`, one line of a log; its number is the event's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from toolhost.gateway.records import ResponseRecord, response_key
from toolhost.gateway.stores.base import Store

LOOK_AGAIN_S = 2.0
"""A wake-up between processes may be lost; then this is how late a follower is."""
PAGE = 500


def entry(kind: str, data: str) -> str:
    return f"{kind} {data}"


def frame(line: str) -> bytes:
    """An entry as a Server-Sent Event."""
    kind, _, data = line.partition(" ")
    return f"event: {kind}\ndata: {data}\n\n".encode()


class Feed:
    """The entries of a run in this process, for any number of readers at their own pace."""

    def __init__(self) -> None:
        self._entries: list[str] = []
        self._ended = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[str]:
        return list(self._entries)

    def add(self, *lines: str) -> None:
        self._entries += lines
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def read(self, first: int = 0) -> AsyncIterator[str]:
        """Entries from number `first`, then what comes, until the end."""
        while True:
            changed, ended = self._changed, self._ended
            for line in self._entries[first:]:
                first += 1
                yield line
            if ended:
                return
            if changed is self._changed:
                await changed.wait()


async def follow(store: Store, ident: str, first: int) -> AsyncIterator[str]:
    """Entries of a stored response from number `first`, then what comes, until it is sealed."""
    key = response_key(ident)
    with store.watch(key) as changed:
        while True:
            changed.clear()
            row = await store.get(key)  # before its log: what is sealed gets no more entries
            lines = await store.entries(key, first, PAGE)
            for line in lines:
                first += 1
                yield line
            if len(lines) == PAGE:
                continue
            if row is None or ResponseRecord.of(row).sealed:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await changed.wait()
