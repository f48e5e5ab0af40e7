"""A store in one SQLite file, for one gateway.

One thread owns the connection and takes everything that is queued into one transaction, so many responses share a
commit. WAL with `synchronous=NORMAL`: what was committed survives the death of the process at any moment; a power cut
may lose the last commits, never the file (https://www.sqlite.org/wal.html). A lock beside the file keeps a second
gateway away: replicas need a store that is made for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from filelock import FileLock, Timeout

from toolhost.gateway.stores.base import Append, Change, Check, Conflict, Put, Remove, Row, Store, StoreError

T = TypeVar("T")

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE rows (
    key TEXT PRIMARY KEY, version INTEGER NOT NULL, data TEXT NOT NULL, due REAL, expires REAL
) WITHOUT ROWID;
CREATE INDEX rows_by_due ON rows (due) WHERE due IS NOT NULL;
CREATE INDEX rows_by_expires ON rows (expires) WHERE expires IS NOT NULL;
CREATE TABLE entries (key TEXT NOT NULL, number INTEGER NOT NULL, entry TEXT NOT NULL, PRIMARY KEY (key, number))
WITHOUT ROWID;
"""
PURGE_S = 60.0
"""How often expired rows are removed; they are not seen before either."""


class _Job(NamedTuple):
    work: Callable[[sqlite3.Connection], object]
    future: asyncio.Future[object]
    loop: asyncio.AbstractEventLoop


class SqliteStore(Store):
    """See the module. `url` is `sqlite://PATH`, as in `sqlite:///var/lib/toolhost/gateway.sqlite`."""

    shared = False

    def __init__(self, url: str) -> None:
        super().__init__()
        self._path = Path(url.partition("://")[2])
        self._lock = FileLock(f"{self._path}.lock", thread_local=False)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._purged = 0.0

    async def open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(
                f"another gateway uses {self._path}; stop it, or give both a store of redis:// to share"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot use {self._path}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._serve, name="gateway-store", daemon=True)
        self._thread.start()
        await self._do(lambda connection: None)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(thread.join)
        self._lock.release()

    async def get(self, key: str) -> Row | None:
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[str]) -> list[Row | None]:
        return await self._do(lambda connection: [_get(connection, key) for key in keys]) if keys else []

    async def write(self, *changes: Change) -> None:
        await self._do(lambda connection: _apply(connection, changes))
        for change in changes:
            if not isinstance(change, Check):
                self._wake(change.key)

    async def entries(self, key: str, first: int = 0, limit: int = 1000) -> list[str]:
        def work(connection: sqlite3.Connection) -> list[str]:
            found = connection.execute(
                "SELECT entry FROM entries WHERE key = ? AND number >= ? ORDER BY number LIMIT ?", (key, first, limit)
            )
            return [entry for (entry,) in found]

        return await self._do(work)

    async def due(self, limit: int = 100) -> list[str]:
        def work(connection: sqlite3.Connection) -> list[str]:
            found = connection.execute(
                "SELECT key FROM rows WHERE due <= ? AND (expires IS NULL OR expires > ?) ORDER BY due LIMIT ?",
                (time.time(), time.time(), limit),
            )
            return [key for (key,) in found]

        return await self._do(work)

    async def clear_due(self) -> None:
        await self._do(lambda connection: connection.execute("UPDATE rows SET due = 0 WHERE due IS NOT NULL"))

    # --- the thread --------------------------------------------------------------------------------------------------

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._thread is None:
            raise StoreError(f"the store {self._path} is not open")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        self._jobs.put(_Job(work, future, loop))
        return await future  # type: ignore[return-value]  # what `work` returned

    def _serve(self) -> None:
        connection: sqlite3.Connection | None = None
        try:
            while (job := self._jobs.get()) is not None:
                batch = [job]
                last = False
                while not self._jobs.empty() and not last:
                    following = self._jobs.get()
                    last = following is None
                    batch += [following] if following is not None else []
                try:
                    connection = connection or self._connect()
                    answers = self._transact(connection, batch)
                except (sqlite3.Error, OSError) as error:
                    failure = StoreError(f"{self._path} cannot be used: {error}")
                    answers = [(one, None, failure) for one in batch]
                _answer(answers)
                if last:
                    break
        finally:
            if connection is not None:
                connection.close()

    def _transact(self, connection: sqlite3.Connection, batch: Sequence[_Job]) -> list[_Answer]:
        """All of a batch in one transaction; a job that fails by itself writes nothing, the disk's errors fail all."""
        answers: list[_Answer] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._purge(connection)
            for job in batch:
                try:
                    answers.append((job, job.work(connection), None))
                except Conflict as error:
                    answers.append((job, None, error))
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.rollback()
            raise
        return answers

    def _purge(self, connection: sqlite3.Connection) -> None:
        now = time.time()
        if now - self._purged < PURGE_S:
            return
        self._purged = now
        connection.execute("DELETE FROM entries WHERE key IN (SELECT key FROM rows WHERE expires <= ?)", (now,))
        connection.execute("DELETE FROM rows WHERE expires <= ?", (now,))

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            connection.close()
            raise sqlite3.DatabaseError("a newer version wrote it: upgrade, or use another store")
        if version == 0:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        return connection


_Answer = tuple[_Job, object, Exception | None]


def _answer(answers: Sequence[_Answer]) -> None:
    """Hands results to the loops that wait for them: one wake-up a loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0].loop, []).append(answer)
    for loop, group in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, group)


def _resolve(answers: Sequence[_Answer]) -> None:
    for job, result, error in answers:
        if job.future.cancelled():
            continue
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)


# --- statements ------------------------------------------------------------------------------------------------------


def _get(connection: sqlite3.Connection, key: str) -> Row | None:
    found = connection.execute("SELECT version, data, expires FROM rows WHERE key = ?", (key,)).fetchone()
    if found is None or (found[2] is not None and found[2] <= time.time()):
        return None
    return Row(key, found[0], json.loads(found[1]))


def _length(connection: sqlite3.Connection, key: str) -> int:
    """Entries of a log, whose numbers have no gaps; by its last one, for logs are long."""
    last = connection.execute(
        "SELECT number FROM entries WHERE key = ? ORDER BY number DESC LIMIT 1", (key,)
    ).fetchone()
    return 0 if last is None else int(last[0]) + 1


def _version(connection: sqlite3.Connection, key: str) -> int:
    found = connection.execute("SELECT version, expires FROM rows WHERE key = ?", (key,)).fetchone()
    if found is None:
        return 0
    if found[1] is not None and found[1] <= time.time():
        _remove(connection, key)
        return 0
    return int(found[0])


def _apply(connection: sqlite3.Connection, changes: Sequence[Change]) -> None:
    """Checks come first, so that a conflict leaves the transaction that others share untouched."""
    for change in changes:
        match change:
            case Put(key, expected=version) | Check(key, version) | Remove(key, int(version)):
                if _version(connection, key) != version:
                    raise Conflict(key)
            case Append(key, first, _):
                if _length(connection, key) != first:
                    raise Conflict(key)
    now = time.time()
    for change in changes:
        match change:
            case Put():
                connection.execute(
                    "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?)",
                    (
                        change.key,
                        change.expected + 1,
                        json.dumps(change.data),
                        None if change.due_s is None else now + change.due_s,
                        None if change.ttl_s is None else now + change.ttl_s,
                    ),
                )
            case Remove(key):
                _remove(connection, key)
            case Append(key, first, entries):
                connection.executemany(
                    "INSERT INTO entries VALUES (?, ?, ?)",
                    [(key, first + number, entry) for number, entry in enumerate(entries)],
                )


def _remove(connection: sqlite3.Connection, key: str) -> None:
    connection.execute("DELETE FROM rows WHERE key = ?", (key,))
    connection.execute("DELETE FROM entries WHERE key = ?", (key,))
