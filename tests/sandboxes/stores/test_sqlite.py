"""What only a store on a disk can meet: kills, full disks, damaged and newer files."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.errors import StoreConflict, StoreUnavailable
from sandboxes.spec import KeyKind, SessionKey
from sandboxes.stores.base import SessionFilter, Store
from sandboxes.stores.memory import MemoryStore
from sandboxes.stores.registry import store_class
from sandboxes.stores.sqlite import SCHEMA_VERSION, SqliteStore
from sandboxes.testing.store_suite import KEY, attempt_of, record_of, settled

WRITER = """
import asyncio, sys
from pathlib import Path
from sandboxes.stores.sqlite import SqliteStore
from sandboxes.testing.store_suite import KEY, attempt_of, record_of, settled

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    await store.put(record_of(), expected_version=None)
    for number in range(100_000):
        await store.settle(settled(attempt_of(str(number))))
        print(number, flush=True)

asyncio.run(main())
"""


async def test_what_was_committed_survives_the_kill_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    writer = subprocess.Popen(  # noqa: ASYNC220  # it starts at once
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert writer.stdout is not None
    try:
        for _ in range(50):
            assert await asyncio.to_thread(writer.stdout.readline)
    finally:
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()
        writer.wait()
        writer.stdout.close()
    committed = 50 + rest.count(b"\n")
    store = SqliteStore(path)
    await store.open()
    found = {attempt.attempt_id for attempt in await store.attempts(KEY, limit=1_000_000)}
    assert {str(number) for number in range(committed)} <= found
    await store.close()


async def test_a_full_disk_fails_the_write_with_what_to_do_and_the_next_one_works(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.db")
    await store.open()
    written = await store.put(record_of(), expected_version=None)

    def limit(connection: sqlite3.Connection) -> int:
        pages: int = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return pages

    def unlimit(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 1000000")

    await store._do(limit)
    with pytest.raises(StoreUnavailable, match="free space in"):
        await store.put_parts(KEY, "big", {"": b"x" * 1_000_000})
    assert await store.get(KEY) == written
    await store._do(unlimit)
    await store.put_parts(KEY, "big", {"": b"x" * 1_000_000})
    await store.close()


@pytest.mark.parametrize("content", [b"not a database at all" * 400, b"SQLite format 3\x00" + b"\xff" * 8000])
async def test_a_damaged_file_is_named_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(content)
    store = SqliteStore(path)
    with pytest.raises(StoreUnavailable, match=f"{path}.*damaged"):
        await store.open()
    assert path.read_bytes() == content


async def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(StoreUnavailable, match="newer version"):
        await SqliteStore(path).open()


async def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="file"):
        await SqliteStore(tmp_path / "file" / "ledger.db").open()


async def test_a_locked_file_fails_the_call_and_the_next_one_works(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    store = SqliteStore(path, busy_s=0.01)
    await store.open()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.put(record_of(), expected_version=None)
    other.execute("ROLLBACK")
    other.close()
    assert (await store.put(record_of(), expected_version=None)).version == 1
    await store.close()


async def test_a_conflict_in_a_batch_leaves_the_others_committed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.db")
    await store.open()
    keys = [SessionKey("alice", KeyKind.REQUEST, str(number // 2)) for number in range(10)]
    puts = (store.put(record_of(key, f"i{n}"), expected_version=None) for n, key in enumerate(keys))
    answers = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(answer, StoreConflict) for answer in answers] == [False, True] * 5
    assert len(await store.list(SessionFilter())) == 5
    await store.close()


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = store_class("sqlite")(tmp_path / "ledger.db")  # type: ignore[call-arg]
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.get(KEY)


def test_an_unknown_store_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="memory, redis, sqlite"):
        store_class("paper")


IDENTS = st.sampled_from(["a", "b"])
OPERATIONS = st.one_of(
    st.tuples(st.just("open"), IDENTS),
    st.tuples(st.just("write"), IDENTS, st.integers(0, 2)),
    st.tuples(st.just("close"), IDENTS, st.integers(0, 30)),
    st.tuples(st.just("register"), IDENTS, IDENTS),
    st.tuples(st.just("settle"), IDENTS, IDENTS, st.integers(0, 30)),
    st.tuples(st.just("resource"), IDENTS, st.sampled_from([b"1", None])),
    st.tuples(st.just("prune"), st.integers(0, 30), st.integers(0, 30)),
)


async def _apply(store: Store, operations: list[tuple[object, ...]]) -> list[object]:
    """What each operation answered, and what is there in the end."""
    said: list[object] = []
    for number, (name, *rest) in enumerate(operations):
        key = SessionKey("alice", KeyKind.REQUEST, str(rest[0]))
        newest = await store.get(key)
        incarnation = newest.incarnation if newest else "i"
        try:
            match name:
                case "open":
                    said.append(await store.put(record_of(key, f"i{number}"), expected_version=None))
                case "write" if newest is not None and newest.closed_at is None:
                    version = max(newest.version - int(str(rest[1])), 0)
                    changed = dataclasses.replace(newest, calls=number, last_used_at=float(number))
                    said.append(await store.put(changed, expected_version=version))
                case "close" if newest is not None and newest.closed_at is None:
                    closed = dataclasses.replace(newest, closed_at=float(str(rest[1])), phase="closed")
                    said.append(await store.put(closed, expected_version=newest.version))
                case "register":
                    said.append(await store.register(attempt_of(str(rest[1]), key, incarnation, float(number))))
                case "settle":
                    attempt = attempt_of(str(rest[1]), key, incarnation, float(number))
                    await store.settle(settled(attempt, value=str(number), ended_at=float(str(rest[2]))))
                case "resource":
                    state = rest[1]
                    await store.put_parts(key, "r", {"p": state if isinstance(state, bytes) else None})
                case "prune":
                    closed_before, outcomes_before = float(str(rest[0])), float(str(rest[1]))
                    said.append(await store.prune(closed_before=closed_before, outcomes_before=outcomes_before))
        except StoreConflict as error:
            said.append(str(error))
    for ident in ("a", "b"):
        key = SessionKey("alice", KeyKind.REQUEST, ident)
        said += [await store.get(key), list(await store.attempts(key)), await store.get_parts(key, "r")]
    said.append(list(await store.list(SessionFilter(include_closed=True))))
    return said


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=25))
def test_sqlite_and_memory_answer_alike(operations: list[tuple[object, ...]]) -> None:
    async def both() -> None:
        with tempfile.TemporaryDirectory() as directory:
            stores: list[Store] = [SqliteStore(Path(directory) / "ledger.db"), MemoryStore()]
            answers = []
            for store in stores:
                await store.open()
                answers.append(await _apply(store, operations))
                await store.close()
            assert answers[0] == answers[1]

    asyncio.run(both())
