"""A store in one SQLite file, for one gateway.

One thread owns the connection and takes everything that is queued into one transaction, so many responses share a
commit; what can wait waits for more, because a hand-over between threads costs more than the write. WAL with
`synchronous=NORMAL`: what was committed survives the death of the process at any moment; a power cut may lose the last
commits, never the file (https://www.sqlite.org/wal.html). A lock beside the file keeps a second gateway away: replicas
need a store that is made for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from filelock import FileLock

from sandboxes import locks
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
MAX_ROWS = 50
"""Log entries of one statement."""
KNOWN = 20_000
"""Rows whose version the thread remembers."""


class _Job(NamedTuple):
    work: Callable[[_Session], object]
    future: asyncio.Future[object]


class SqliteStore(Store):
    """See the module. `url` is `sqlite://PATH`, as in `sqlite:///var/lib/toolhost/gateway.sqlite`."""

    shared = False

    def __init__(self, url: str) -> None:
        super().__init__()
        self._path = Path(url.partition("://")[2])
        self._lock: FileLock | None = None
        self._waiting: list[_Job] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.SimpleQueue[list[_Job] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._purged = 0.0

    async def open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = locks.take(Path(f"{self._path}.lock"), 0o600)
        except locks.Held:
            raise StoreError(
                f"another gateway uses {self._path}; stop it, or give both a store of redis:// to share"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot use {self._path}: {error.strerror or error}") from error
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._serve, name="gateway-store", daemon=True)
        self._thread.start()
        await self._do(lambda session: None)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._hand_over()
            self._batches.put(None)
            await asyncio.to_thread(thread.join)
        if self._lock is not None:
            self._lock.release()

    async def get(self, key: str) -> Row | None:
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[str]) -> list[Row | None]:
        return await self._do(lambda session: [session.get(key) for key in keys]) if keys else []

    async def write(self, *changes: Change, patience_s: float = 0.0) -> None:
        await self._do(lambda session: session.apply(changes), patience_s)
        for change in changes:
            if not isinstance(change, Check):
                self._wake(change.key)

    async def entries(self, key: str, first: int = 0, limit: int = 1000) -> list[str]:
        def work(session: _Session) -> list[str]:
            found = session.read(
                "SELECT entry FROM entries WHERE key = ? AND number >= ? ORDER BY number LIMIT ?", (key, first, limit)
            )
            return [entry for (entry,) in found]

        return await self._do(work)

    async def due(self, limit: int = 100) -> list[str]:
        def work(session: _Session) -> list[str]:
            found = session.read(
                "SELECT key FROM rows WHERE due <= ? AND (expires IS NULL OR expires > ?) ORDER BY due LIMIT ?",
                (time.time(), time.time(), limit),
            )
            return [key for (key,) in found]

        return await self._do(work)

    async def clear_due(self) -> None:
        await self._do(lambda session: session.execute("UPDATE rows SET due = 0 WHERE due IS NOT NULL"))

    # --- the thread --------------------------------------------------------------------------------------------------

    async def _do(self, work: Callable[[_Session], T], patience_s: float = 0.0) -> T:
        if self._thread is None or self._loop is None:
            raise StoreError(f"the store {self._path} is not open")
        future: asyncio.Future[object] = self._loop.create_future()
        self._waiting.append(_Job(work, future))
        if patience_s <= 0:
            self._hand_over()
        elif self._timer is None:
            self._timer = self._loop.call_later(patience_s, self._hand_over)
        return await future  # type: ignore[return-value]  # what `work` returned

    def _hand_over(self) -> None:
        """Give the thread everything that waits, in its order."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._batches.put(self._waiting)
            self._waiting = []

    def _serve(self) -> None:
        session: _Session | None = None
        last = False
        try:
            while not last and (batch := self._batches.get()) is not None:
                while not self._batches.empty() and not last:
                    following = self._batches.get()
                    last = following is None
                    batch += following or []
                try:
                    session = session or _Session(self._connect())
                    answers = self._transact(session, batch)
                except Exception as error:  # noqa: BLE001 - whoever waits is told, and the thread goes on
                    failure = StoreError(f"{self._path} cannot be used: {error}")
                    answers = [(one, None, failure) for one in batch]
                self._answer(answers)
        finally:
            if session is not None:
                session.close()

    def _answer(self, answers: Sequence[_Answer]) -> None:
        """One wake-up of the loop for all."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_resolve, answers)

    def _transact(self, session: _Session, batch: Sequence[_Job]) -> list[_Answer]:
        """All of a batch in one transaction; a job that fails by itself writes nothing, the disk's errors fail all."""
        answers: list[_Answer] = []
        with session.transaction():
            self._purge(session)
            for job in batch:
                try:
                    answers.append((job, job.work(session), None))
                except Conflict as error:
                    answers.append((job, None, error))
        return answers

    def _purge(self, session: _Session) -> None:
        now = time.time()
        if now - self._purged < PURGE_S:
            return
        self._purged = now
        session.purge(now)

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


def _resolve(answers: Sequence[_Answer]) -> None:
    for job, result, error in answers:
        if job.future.cancelled():
            continue
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)


class _Session:
    """The thread's connection, and what it knows of the file: nobody else writes it.

    Each statement gives the interpreter's lock away and waits for it, so versions and lengths of logs are remembered,
    and new entries of logs are written together, at the end of a transaction or before something reads.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._versions: dict[str, tuple[int, float | None]] = {}
        self._lengths: dict[str, int] = {}
        self._entries: list[tuple[str, int, str]] = []

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Begin and commit. Nothing is remembered of one that failed."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._flush()
            self._connection.execute("COMMIT")
        except BaseException:
            self._entries.clear()
            self._versions.clear()
            self._lengths.clear()
            if self._connection.in_transaction:
                self._connection.rollback()
            raise
        for known in (self._versions, self._lengths):
            while len(known) > KNOWN:
                del known[next(iter(known))]

    def read(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """A query of any kind; what waits is written first."""
        self._flush()
        return self._connection.execute(statement, values)

    def execute(self, statement: str) -> None:
        """A change of many rows, but not of versions."""
        self.read(statement)

    def get(self, key: str) -> Row | None:
        found = self.read("SELECT version, data, expires FROM rows WHERE key = ?", (key,)).fetchone()
        if found is None or (found[2] is not None and found[2] <= time.time()):
            return None
        return Row(key, found[0], json.loads(found[1]))

    def apply(self, changes: Sequence[Change]) -> None:
        """Checks come first, so that a conflict leaves the transaction that others share untouched."""
        for change in changes:
            match change:
                case Put(key, expected=version) | Check(key, version) | Remove(key, int(version)):
                    if self._version(key) != version:
                        raise Conflict(key)
                case Append(key, first, _):
                    if self._length(key) != first:
                        raise Conflict(key)
        now = time.time()
        for change in changes:
            match change:
                case Put():
                    self._put(change, now)
                case Remove(key):
                    self._remove(key)
                case Append(key, first, entries):
                    self._entries += [(key, first + number, entry) for number, entry in enumerate(entries)]
                    self._lengths[key] = first + len(entries)

    def purge(self, now: float) -> None:
        """Remove what has expired."""
        self.read("DELETE FROM entries WHERE key IN (SELECT key FROM rows WHERE expires <= ?)", (now,))
        self.read("DELETE FROM rows WHERE expires <= ?", (now,))
        self._versions.clear()
        self._lengths.clear()

    def _put(self, change: Put, now: float) -> None:
        expires = None if change.ttl_s is None else now + change.ttl_s
        due = None if change.due_s is None else now + change.due_s
        version = change.expected + 1
        self._connection.execute(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?)",
            (change.key, version, json.dumps(change.data), due, expires),
        )
        self._versions.pop(change.key, None)  # to the end: the oldest are forgotten first
        self._versions[change.key] = version, expires

    def _remove(self, key: str) -> None:
        self.read("DELETE FROM rows WHERE key = ?", (key,))
        self.read("DELETE FROM entries WHERE key = ?", (key,))
        self._versions[key] = 0, None
        self._lengths[key] = 0

    def _version(self, key: str) -> int:
        known = self._versions.get(key)
        if known is None:
            found = self._connection.execute("SELECT version, expires FROM rows WHERE key = ?", (key,)).fetchone()
            known = self._versions[key] = (0, None) if found is None else (int(found[0]), found[1])
        version, expires = known
        if expires is not None and expires <= time.time():
            self._remove(key)
            return 0
        return version

    def _length(self, key: str) -> int:
        """Entries of a log, whose numbers have no gaps; by its last one, for logs are long."""
        known = self._lengths.get(key)
        if known is None:
            last = self.read("SELECT number FROM entries WHERE key = ? ORDER BY number DESC LIMIT 1", (key,)).fetchone()
            known = self._lengths[key] = 0 if last is None else int(last[0]) + 1
        return known

    def _flush(self) -> None:
        """Write the entries that wait, many in a statement."""
        rows, self._entries = self._entries, []
        for start in range(0, len(rows), MAX_ROWS):
            part = rows[start : start + MAX_ROWS]
            places = ", ".join(["(?, ?, ?)"] * len(part))
            values = [value for row in part for value in row]
            self._connection.execute(f"INSERT INTO entries VALUES {places}", values)
