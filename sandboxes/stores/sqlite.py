"""A store in one SQLite file.

One thread owns the connection; the event loop never waits for the disk. The thread takes everything that is queued
into one transaction, so that many sessions share one commit. WAL with `synchronous=NORMAL`: what was committed survives
the death of the process at any moment; a power cut may lose the last commits, never the file
(https://www.sqlite.org/wal.html, "Performance Considerations").

A full disk or a locked file fails the calls of that moment with StoreUnavailable; the next calls try again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from sandboxes.errors import SandboxError, StoreConflict, StoreUnavailable
from sandboxes.spec import SessionKey
from sandboxes.stores import codec
from sandboxes.stores.base import AttemptRecord, SessionFilter, SessionRecord, Store

T = TypeVar("T")

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    principal TEXT NOT NULL,
    incarnation TEXT NOT NULL UNIQUE,
    phase TEXT NOT NULL,
    last_used REAL NOT NULL,
    closed_at REAL,
    version INTEGER NOT NULL,
    record TEXT NOT NULL
);
CREATE UNIQUE INDEX one_open_session ON sessions (key) WHERE closed_at IS NULL;
CREATE INDEX sessions_by_key ON sessions (key, id);
CREATE TABLE attempts (
    key TEXT NOT NULL,
    attempt TEXT NOT NULL,
    incarnation TEXT NOT NULL,
    digest TEXT NOT NULL,
    registered REAL NOT NULL,
    ended REAL,
    receipt TEXT,
    outcome TEXT,
    pruned INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (key, attempt)
) WITHOUT ROWID;
CREATE TABLE resources (
    key TEXT NOT NULL,
    name TEXT NOT NULL,
    part TEXT NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (key, name, part)
) WITHOUT ROWID;
"""

# Of ledgers that an earlier version made: what only `prune` has a use for is not kept up to date with every attempt.
UNUSED = "DROP INDEX IF EXISTS attempts_by_incarnation"
SETTLED = "(?, ?, ?, ?, ?, ?, ?, ?)"
SETTLE = (
    "INSERT INTO attempts (key, attempt, incarnation, digest, registered, ended, receipt, outcome) VALUES {}"
    " ON CONFLICT (key, attempt) DO UPDATE"
    " SET ended = excluded.ended, receipt = excluded.receipt, outcome = excluded.outcome WHERE ended IS NULL"
)
# Attempts of one statement, largest first. Each gives the interpreter's lock away and has to wait for it again.
TOGETHER = {count: SETTLE.format(", ".join([SETTLED] * count)) for count in (32, 8, 1)}


class _Job(NamedTuple):
    work: Callable[[sqlite3.Connection], object]
    future: asyncio.Future[object]
    loop: asyncio.AbstractEventLoop


class SqliteStore(Store):
    """See the module. `busy_s`: how long to wait for another process that holds the file."""

    def __init__(self, path: Path, *, busy_s: float = 5.0) -> None:
        self._path = path
        self._busy_s = busy_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def open(self) -> None:
        opened: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        first = _Job(lambda connection: None, opened, asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._serve, args=(first,), name="sqlite-store", daemon=True)
        self._thread.start()
        try:
            await opened
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(thread.join)

    async def get(self, key: SessionKey) -> SessionRecord | None:
        def work(connection: sqlite3.Connection) -> SessionRecord | None:
            row = connection.execute(
                "SELECT record, version FROM sessions WHERE key = ? ORDER BY id DESC LIMIT 1", (str(key),)
            ).fetchone()
            return None if row is None else codec.read_record(*row)

        return await self._do(work)

    async def put(self, record: SessionRecord, *, expected_version: int | None) -> SessionRecord:
        return await self._do(lambda connection: _put(connection, record, expected_version))

    async def list(self, which: SessionFilter) -> Sequence[SessionRecord]:
        def work(connection: sqlite3.Connection) -> Sequence[SessionRecord]:
            clauses, values = ["1"], list[object]()
            if not which.include_closed:
                clauses.append("closed_at IS NULL")
            if which.principal is not None:
                clauses.append("principal = ?")
                values.append(which.principal)
            if which.phases is not None:
                clauses.append(f"phase IN ({', '.join('?' * len(which.phases))})")
                values.extend(which.phases)
            rows = connection.execute(
                f"SELECT record, version FROM sessions WHERE {' AND '.join(clauses)}"
                " ORDER BY last_used DESC, incarnation LIMIT ?",
                (*values, which.limit),
            )
            return [codec.read_record(*row) for row in rows]

        return await self._do(work)

    async def register(self, attempt: AttemptRecord) -> AttemptRecord:
        def work(connection: sqlite3.Connection) -> AttemptRecord:
            known = _attempt(connection, attempt.session, attempt.attempt_id)
            if known is None:
                _insert_attempt(connection, attempt)
            return known or attempt

        return await self._do(work)

    async def settle(self, *attempts: AttemptRecord) -> None:
        if any(attempt.outcome is None for attempt in attempts):
            raise ValueError("an attempt is settled with an outcome")

        def work(connection: sqlite3.Connection) -> None:
            _settle(connection, attempts)

        await self._do(work)

    async def attempt(self, key: SessionKey, attempt_id: str) -> AttemptRecord | None:
        return await self._do(lambda connection: _attempt(connection, key, attempt_id))

    async def attempts(self, key: SessionKey, *, limit: int = 100, unsettled: bool = False) -> Sequence[AttemptRecord]:
        def work(connection: sqlite3.Connection) -> Sequence[AttemptRecord]:
            rows = connection.execute(
                f"SELECT {_ATTEMPT} FROM attempts WHERE key = ? {'AND ended IS NULL' if unsettled else ''}"
                " ORDER BY registered DESC, attempt LIMIT ?",
                (str(key), limit),
            )
            return [_read_attempt(key, row) for row in rows]

        return await self._do(work)

    async def put_parts(self, key: SessionKey, resource: str, parts: Mapping[str, bytes | None]) -> None:
        gone = [(str(key), resource, part) for part, state in parts.items() if state is None]
        kept = [(str(key), resource, part, state) for part, state in parts.items() if state is not None]

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM resources WHERE key = ? AND name = ? AND part = ?", gone)
            connection.executemany("INSERT OR REPLACE INTO resources VALUES (?, ?, ?, ?)", kept)

        await self._do(work)

    async def get_parts(self, key: SessionKey, resource: str) -> Mapping[str, bytes]:
        def work(connection: sqlite3.Connection) -> Mapping[str, bytes]:
            rows = connection.execute(
                "SELECT part, state FROM resources WHERE key = ? AND name = ?", (str(key), resource)
            )
            return {part: bytes(state) for part, state in rows}

        return await self._do(work)

    async def prune(self, *, closed_before: float, outcomes_before: float) -> int:
        def work(connection: sqlite3.Connection) -> int:
            rows = connection.execute(
                "DELETE FROM attempts WHERE key IN"
                " (SELECT key FROM sessions WHERE closed_at IS NOT NULL AND closed_at < ?1) AND incarnation IN"
                " (SELECT incarnation FROM sessions WHERE closed_at IS NOT NULL AND closed_at < ?1)",
                (closed_before,),
            ).rowcount
            rows += connection.execute(
                "DELETE FROM sessions WHERE closed_at IS NOT NULL AND closed_at < ?", (closed_before,)
            ).rowcount
            rows += connection.execute(
                "UPDATE attempts SET outcome = NULL, pruned = 1 WHERE outcome IS NOT NULL AND ended < ?",
                (outcomes_before,),
            ).rowcount
            return rows

        return await self._do(work)

    # --- the thread --------------------------------------------------------------------------------------------------

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._thread is None:
            raise StoreUnavailable(f"the store {self._path} is not open")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        self._jobs.put(_Job(work, future, loop))
        return await future  # type: ignore[return-value]  # what `work` returned

    def _serve(self, first: _Job) -> None:
        try:
            connection = self._connect()
        except SandboxError as error:
            _answer([(first, None, error)])
            return
        _answer([(first, None, None)])
        try:
            while (job := self._jobs.get()) is not None:
                batch = [job]
                last = False
                while not self._jobs.empty():
                    following = self._jobs.get()
                    if following is None:
                        last = True
                        break
                    batch.append(following)
                _answer(self._transact(connection, batch))
                if last:
                    break
        finally:
            connection.close()

    def _transact(self, connection: sqlite3.Connection, batch: Sequence[_Job]) -> Sequence[_Answer]:
        """All of a batch in one transaction. A job that fails by itself writes nothing; the disk's errors fail all."""
        answers: list[_Answer] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in batch:
                try:
                    answers.append((job, job.work(connection), None))
                except StoreConflict as error:
                    answers.append((job, None, error))
                except ValueError as error:
                    damaged = StoreUnavailable(f"{self._path} holds a row that cannot be read: {error}")
                    answers.append((job, None, damaged))
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.rollback()
            unavailable = self._unavailable(error)
            return [(job, None, unavailable) for job in batch]
        return answers

    def _connect(self) -> sqlite3.Connection:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreUnavailable(f"cannot open {self._path}: {error.strerror}") from error
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(self._path, timeout=self._busy_s, isolation_level=None)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA temp_store = MEMORY")  # what a statement of many rows keeps to undo itself
            if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
            self._migrate(connection)
        except (sqlite3.Error, StoreUnavailable) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, StoreUnavailable):
                raise
            raise self._unavailable(error) from error
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise StoreUnavailable(
                f"{self._path} was written by a newer version (schema {version}, this one reads {SCHEMA_VERSION}):"
                " upgrade, or use another state directory"
            )
        if version == 0:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        connection.execute(UNUSED)

    def _unavailable(self, error: sqlite3.Error) -> StoreUnavailable:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR:
            what = f"the disk of {self._path} is full or failing: free space in {self._path.parent}"
        elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            what = f"{self._path} is locked by another process"
        elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            what = f"{self._path} cannot be written: check its owner and mode"
        elif code in (0, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            what = f"{self._path} is damaged: restore a backup, or move it away to begin with an empty ledger"
        else:
            what = f"{self._path} cannot be used"
        return StoreUnavailable(f"{what} ({error})")


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

_ATTEMPT = "attempt, incarnation, digest, registered, receipt, outcome, pruned"


def _put(connection: sqlite3.Connection, record: SessionRecord, expected: int | None) -> SessionRecord:
    key = str(record.key)
    version = 1 if expected is None else expected + 1
    values = (record.phase, record.last_used_at, record.closed_at, version, codec.write_record(record))
    if expected is None:
        if connection.execute("SELECT 1 FROM sessions WHERE key = ? AND closed_at IS NULL", (key,)).fetchone():
            raise StoreConflict("the session is already open", session=key)
        connection.execute(
            "INSERT INTO sessions (key, principal, incarnation, phase, last_used, closed_at, version, record)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (key, record.key.principal, record.incarnation, *values),
        )
    else:
        changed = connection.execute(
            "UPDATE sessions SET phase = ?, last_used = ?, closed_at = ?, version = ?, record = ?"
            " WHERE incarnation = ? AND version = ? AND id = (SELECT max(id) FROM sessions WHERE key = ?)",
            (*values, record.incarnation, expected, key),
        )
        if changed.rowcount == 0:
            raise StoreConflict("the session was written by somebody else", session=key)
    if record.closed_at is not None:
        connection.execute("DELETE FROM resources WHERE key = ?", (key,))
    return codec.read_record(values[-1], version)


def _attempt(connection: sqlite3.Connection, key: SessionKey, attempt_id: str) -> AttemptRecord | None:
    row = connection.execute(
        f"SELECT {_ATTEMPT} FROM attempts WHERE key = ? AND attempt = ?", (str(key), attempt_id)
    ).fetchone()
    return None if row is None else _read_attempt(key, row)


def _read_attempt(key: SessionKey, row: tuple[str, str, str, float, str | None, str | None, int]) -> AttemptRecord:
    attempt_id, incarnation, digest, registered, receipt, outcome, pruned = row
    return AttemptRecord(
        session=key,
        incarnation=incarnation,
        attempt_id=attempt_id,
        digest=digest,
        registered_at=registered,
        receipt=None if receipt is None else codec.read_receipt(receipt),
        outcome=None if outcome is None or receipt is None else codec.read_outcome(outcome, receipt),
        pruned=bool(pruned),
    )


def _insert_attempt(connection: sqlite3.Connection, attempt: AttemptRecord) -> None:
    connection.execute(
        "INSERT OR IGNORE INTO attempts (key, attempt, incarnation, digest, registered) VALUES (?, ?, ?, ?, ?)",
        (str(attempt.session), attempt.attempt_id, attempt.incarnation, attempt.digest, attempt.registered_at),
    )


def _settle(connection: sqlite3.Connection, attempts: Sequence[AttemptRecord]) -> None:
    rows = [_settled(attempt) for attempt in attempts]
    at = 0
    for count, statement in TOGETHER.items():
        while len(rows) - at >= count:
            connection.execute(statement, list(itertools.chain.from_iterable(rows[at : at + count])))
            at += count


def _settled(attempt: AttemptRecord) -> tuple[object, ...]:
    assert attempt.outcome is not None
    receipt = attempt.outcome.receipt
    return (
        str(attempt.session),
        attempt.attempt_id,
        attempt.incarnation,
        attempt.digest,
        attempt.registered_at,
        receipt.ended_at,
        codec.write_receipt(receipt),
        codec.write_outcome(attempt.outcome),
    )
