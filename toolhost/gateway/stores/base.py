"""The gateway's store: rows changed by compare-and-set, logs that only grow, and wake-ups for who follows them.

Above: `records`, `runs`, `ledger`, `conversations`: everything they keep goes through `write`, whose changes happen all
or not at all. Below: one database each. A key is `kind/id`. The clock for `due_s` and `ttl_s` is the store's own, so
that replicas whose clocks differ agree.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolhost.errors import ToolhostError


class StoreError(ToolhostError):
    """The store cannot be reached or used now; the message says what to do."""


class Conflict(StoreError):
    """Another writer was first: nothing of this write happened. `key` is the row that differed."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} was written by somebody else")
        self.key = key


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it was read. `version` counts its writes from 1."""

    key: str
    version: int
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Put:
    """Write a row whose version is `expected`; 0: it must not exist yet.

    `due_s`: seconds from now after which `due` lists the row. `ttl_s`: seconds from now after which it is gone.
    """

    key: str
    data: Mapping[str, Any]
    expected: int
    due_s: float | None = None
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a row with its log; `expected` None: whatever its version, and also if it is not there."""

    key: str
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The row must have this version (0: must not exist); nothing is written."""

    key: str
    version: int


@dataclass(frozen=True, slots=True)
class Append:
    """Add entries to the log of an existing row. `first` is the number of entries that it must have so far."""

    key: str
    first: int
    entries: Sequence[str]


Change = Put | Remove | Check | Append


class Store(abc.ABC):
    """Implementations run the contract suite `tests/toolhost/gateway/test_stores.py`."""

    shared: bool
    """Whether other processes may use it at the same time."""

    def __init__(self) -> None:
        self._watching: dict[str, set[asyncio.Event]] = {}

    @abc.abstractmethod
    async def open(self) -> None:
        """Called once, before anything else. Raises StoreError."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Called once, at the end; also after an `open` that failed."""

    @abc.abstractmethod
    async def get(self, key: str) -> Row | None:
        """A row, None if there is none or its time is over. Raises StoreError."""

    @abc.abstractmethod
    async def get_many(self, keys: Sequence[str]) -> list[Row | None]:
        """Rows in the order of the keys. Raises StoreError."""

    @abc.abstractmethod
    async def write(self, *changes: Change, patience_s: float = 0.0) -> None:
        """All changes or none. Raises Conflict, StoreError.

        `patience_s`: how long this may wait for other writes to go with. The order of one's own writes stays.
        """

    @abc.abstractmethod
    async def entries(self, key: str, first: int = 0, limit: int = 1000) -> list[str]:
        """Entries of a row's log, from number `first`. Raises StoreError."""

    @abc.abstractmethod
    async def due(self, limit: int = 100) -> list[str]:
        """Keys of rows whose `due_s` is over, longest first. Raises StoreError."""

    @abc.abstractmethod
    async def clear_due(self) -> None:
        """Make every row that has a `due_s` due now: who would have renewed them is known to be gone."""

    @contextlib.contextmanager
    def watch(self, key: str) -> Iterator[asyncio.Event]:
        """An event that is set when a row or its log is written, by any process. Wake-ups may be lost between
        processes: whoever waits also looks again after a while."""
        event = asyncio.Event()
        self._watching.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            followers = self._watching[key]
            followers.discard(event)
            if not followers:
                del self._watching[key]

    def _wake(self, key: str) -> None:
        for event in self._watching.get(key, ()):
            event.set()
