"""The contract suites of stores. A test module has `class TestStore(StoreSuite)` and a fixture `store`, opened; for a
shared store also `class TestSharedStore(SharedStoreSuite)` with a fixture `shared_store`."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from sandboxes.errors import SessionHeld, StoreConflict
from sandboxes.spec import (
    Cause,
    CauseKind,
    Ending,
    FileRef,
    Handle,
    ImageRef,
    KeyKind,
    Outcome,
    Output,
    Receipt,
    Retention,
    Rung,
    SessionKey,
    State,
)
from sandboxes.stores.base import AttemptRecord, SessionFilter, SessionRecord, SharedStore, Store

KEY = SessionKey("alice", KeyKind.REQUEST, "a")
OTHER = SessionKey("bob", KeyKind.REQUEST, "a")


def record_of(key: SessionKey = KEY, incarnation: str = "i1", **fields: object) -> SessionRecord:
    values: dict[str, object] = {
        "key": key,
        "retention": Retention.CHOSEN,
        "phase": "new",
        "incarnation": incarnation,
        "created_at": 1.0,
        "last_used_at": 1.0,
        **fields,
    }
    return SessionRecord(**values)  # type: ignore[arg-type]  # named fields


def attempt_of(ident: str, key: SessionKey = KEY, incarnation: str = "i1", at: float = 1.0) -> AttemptRecord:
    return AttemptRecord(key, incarnation, ident, "d" * 64, at)


def settled(attempt: AttemptRecord, *, value: str = "42", ended_at: float = 2.0) -> AttemptRecord:
    receipt = Receipt(
        session=str(attempt.session),
        epoch=1,
        sequence=1,
        attempt_id=attempt.attempt_id,
        digest=attempt.digest,
        queued_at=attempt.registered_at,
        started_at=1.5,
        ended_at=ended_at,
        ending=Ending.TIMED_OUT,
        state=State.KEPT,
        bytes_out=3,
        cause=Cause(CauseKind.DEADLINE, rung=Rung.FIRST_INTERRUPT, limit=0.5),
    )
    outcome = Outcome(
        receipt,
        Output("head", "tail", 7, "/mnt/data/.outputs/1.txt", False),
        value=value,
        error="e\u00e9\U0001f600",
        background=Output("late"),
        images=(ImageRef("/mnt/data/f.png", "image/png"),),
        files=(FileRef("/mnt/data/f.txt", 3),),
        exit_code=-9,
        notes=("a note",),
        state_lost_before="because",
    )
    return dataclasses.replace(attempt, outcome=outcome, receipt=receipt)


class StoreSuite:
    """Every store gives back what it was given, and refuses what would overwrite another's write."""

    async def test_a_record_comes_back_whole(self, store: Store) -> None:
        handle = Handle("fake", "k", "s", "i", "w", "n", 2.5)
        record = record_of(
            handle=handle,
            workspace="w",
            node="n",
            lost_reason="r",
            ttl_s=5.0,
            epoch=3,
            sequence=9,
            calls=2,
            last_used_at=7.25,
        )
        written = await store.put(record, expected_version=None)
        assert written == dataclasses.replace(record, version=1)
        assert await store.get(KEY) == written
        assert await store.get(OTHER) is None

    async def test_one_key_has_one_open_session(self, store: Store) -> None:
        written = await store.put(record_of(), expected_version=None)
        with pytest.raises(StoreConflict):
            await store.put(record_of(incarnation="i2"), expected_version=None)
        await store.put(dataclasses.replace(written, closed_at=3.0, phase="closed"), expected_version=1)
        second = await store.put(record_of(incarnation="i2"), expected_version=None)
        assert await store.get(KEY) == second
        everything = await store.list(SessionFilter(include_closed=True))
        assert sorted(record.incarnation for record in everything) == ["i1", "i2"]
        assert [record.incarnation for record in await store.list(SessionFilter())] == ["i2"]

    async def test_a_write_over_another_version_is_refused_and_changes_nothing(self, store: Store) -> None:
        first = await store.put(record_of(), expected_version=None)
        second = await store.put(dataclasses.replace(first, calls=1), expected_version=1)
        for stale in (first, dataclasses.replace(second, incarnation="i9")):
            with pytest.raises(StoreConflict):
                await store.put(dataclasses.replace(stale, calls=99), expected_version=stale.version)
        with pytest.raises(StoreConflict):
            await store.put(record_of(OTHER), expected_version=1)
        assert await store.get(KEY) == second

    async def test_of_many_writers_of_one_version_one_wins(self, store: Store) -> None:
        first = await store.put(record_of(), expected_version=None)
        writes = (store.put(dataclasses.replace(first, calls=n), expected_version=1) for n in range(8))
        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert sum(isinstance(answer, SessionRecord) for answer in answers) == 1
        assert sum(isinstance(answer, StoreConflict) for answer in answers) == 7

    async def test_lists_are_filtered_newest_use_first(self, store: Store) -> None:
        for number in range(4):
            key = SessionKey("alice" if number % 2 else "bob", KeyKind.REQUEST, str(number))
            phase = "idle" if number > 1 else "new"
            await store.put(
                record_of(key, f"i{number}", last_used_at=float(number), phase=phase), expected_version=None
            )
        assert [r.key.id for r in await store.list(SessionFilter())] == ["3", "2", "1", "0"]
        assert [r.key.id for r in await store.list(SessionFilter(principal="alice"))] == ["3", "1"]
        assert [r.key.id for r in await store.list(SessionFilter(phases=frozenset({"new"})))] == ["1", "0"]
        assert [r.key.id for r in await store.list(SessionFilter(phases=frozenset()))] == []
        assert [r.key.id for r in await store.list(SessionFilter(limit=1))] == ["3"]

    async def test_an_attempt_is_registered_once_and_settled_once(self, store: Store) -> None:
        await store.put(record_of(), expected_version=None)
        attempt = attempt_of("one")
        assert await store.register(attempt) == attempt
        assert await store.register(dataclasses.replace(attempt, digest="e" * 64)) == attempt
        first = settled(attempt)
        await store.settle(first)
        await store.settle(settled(attempt, value="another"))
        assert await store.attempt(KEY, "one") == first
        assert await store.register(attempt) == first
        assert await store.attempt(OTHER, "one") is None

    async def test_an_outcome_registers_its_attempt(self, store: Store) -> None:
        await store.put(record_of(), expected_version=None)
        await store.settle(settled(attempt_of("one")))
        assert await store.attempt(KEY, "one") == settled(attempt_of("one"))
        with pytest.raises(ValueError, match="outcome"):
            await store.settle(attempt_of("two"))

    async def test_attempts_come_newest_first(self, store: Store) -> None:
        await store.put(record_of(), expected_version=None)
        for number in range(4):
            await store.register(attempt_of(str(number), at=float(number)))
        await store.settle(settled(attempt_of("2", at=2.0)))
        assert [a.attempt_id for a in await store.attempts(KEY)] == ["3", "2", "1", "0"]
        assert [a.attempt_id for a in await store.attempts(KEY, unsettled=True, limit=2)] == ["3", "1"]
        assert await store.attempts(OTHER) == []

    async def test_an_attempt_id_stays_taken_when_its_session_has_closed(self, store: Store) -> None:
        written = await store.put(record_of(), expected_version=None)
        await store.settle(settled(attempt_of("one")))
        await store.put(dataclasses.replace(written, closed_at=3.0), expected_version=1)
        await store.put(record_of(incarnation="i2"), expected_version=None)
        assert await store.attempt(KEY, "one") == settled(attempt_of("one"))

    async def test_resources_live_as_long_as_their_session(self, store: Store) -> None:
        written = await store.put(record_of(), expected_version=None)
        await store.put_parts(KEY, "browser", {"head": b"\x00state", "1": b"one", "2": b"two"})
        await store.put_parts(KEY, "browser/1", {"": b"another resource"})
        await store.put_parts(KEY, "browser", {"1": None, "2": b"new", "3": b"", "never": None})
        assert await store.get_parts(KEY, "browser") == {"head": b"\x00state", "2": b"new", "3": b""}
        assert await store.get_parts(KEY, "browser/1") == {"": b"another resource"}
        assert await store.get_parts(KEY, "other") == {}
        assert await store.get_parts(OTHER, "browser") == {}
        await store.put(dataclasses.replace(written, closed_at=3.0), expected_version=1)
        assert await store.get_parts(KEY, "browser") == {}

    async def test_pruning_forgets_old_texts_then_old_sessions(self, store: Store) -> None:
        written = await store.put(record_of(), expected_version=None)
        await store.settle(settled(attempt_of("old"), ended_at=2.0))
        await store.settle(settled(attempt_of("new"), ended_at=20.0))
        await store.register(attempt_of("open"))
        assert await store.prune(closed_before=0.0, outcomes_before=10.0) == 1
        old = await store.attempt(KEY, "old")
        assert old is not None
        assert (old.pruned, old.outcome) == (True, None)
        assert old.receipt is not None
        new = await store.attempt(KEY, "new")
        assert new is not None
        assert new.outcome is not None
        await store.put(dataclasses.replace(written, closed_at=3.0), expected_version=1)
        assert await store.prune(closed_before=3.0, outcomes_before=0.0) == 0
        assert await store.prune(closed_before=3.5, outcomes_before=0.0) == 4
        assert await store.get(KEY) is None
        assert await store.attempt(KEY, "old") is None

    async def test_a_long_outcome_comes_back_whole(self, store: Store) -> None:
        await store.put(record_of(), expected_version=None)
        long = settled(attempt_of("long"), value="\u00e9\x00\n" * 1_000_000)
        await store.settle(long, settled(attempt_of("short")))
        assert await store.attempt(KEY, "long") == long
        assert [a.attempt_id for a in await store.attempts(KEY)] == ["long", "short"]

    async def test_many_are_listed_pruned_and_searched(self, store: Store) -> None:
        for number in range(1203):
            key = SessionKey("p", KeyKind.REQUEST, str(number))
            await store.put(record_of(key, f"i{number}", last_used_at=float(number)), expected_version=None)
        assert [r.key.id for r in await store.list(SessionFilter())][:3] == ["1202", "1201", "1200"]
        assert len(await store.list(SessionFilter(limit=5000))) == 1203
        for record in await store.list(SessionFilter(limit=1150)):
            closed = dataclasses.replace(record, closed_at=2.0, phase="closed")
            await store.put(closed, expected_version=record.version)
        assert len(await store.list(SessionFilter(limit=5000))) == 53
        assert await store.prune(closed_before=3.0, outcomes_before=0.0) == 1150
        assert len(await store.list(SessionFilter(include_closed=True, limit=5000))) == 53


class SharedStoreSuite:
    """What replicas know of each other, and that of several that leave a session one closes it."""

    async def test_a_replica_lives_as_long_as_it_beats(self, shared_store: SharedStore) -> None:
        assert not await shared_store.beat("one", 60, {"pool": ["s"], "n": 1})
        await shared_store.beat("short", 0.01, {})
        await asyncio.sleep(0.05)
        assert await shared_store.replicas() == {"one": {"pool": ["s"], "n": 1}}
        assert await shared_store.beat("one", 60, {})
        assert await shared_store.replicas() == {"one": {}}
        await shared_store.leave("one")
        await shared_store.leave("nobody")
        assert await shared_store.replicas() == {}

    async def test_only_an_open_incarnation_is_held_and_only_by_the_living(self, shared_store: SharedStore) -> None:
        written = await shared_store.put(record_of(), expected_version=None)
        for replica in ("one", "two"):
            await shared_store.beat(replica, 60, {})
        assert not await shared_store.hold(OTHER, "i1", "one", attached=True)
        assert not await shared_store.hold(KEY, "i9", "one", attached=True)
        assert await shared_store.hold(KEY, "i1", "one", attached=True)
        assert await shared_store.hold(KEY, "i1", "two", attached=False)
        assert await shared_store.hold(KEY, "i1", "dead", attached=True)
        assert await shared_store.holders(KEY) == {"one": True, "two": False}
        assert await shared_store.holders(KEY, dead=True) == {"dead": True}
        await shared_store.release(KEY, "one")
        await shared_store.leave("two")
        assert await shared_store.holders(KEY) == {}
        closing = await shared_store.put(dataclasses.replace(written, phase="closing"), expected_version=1)
        assert not await shared_store.hold(KEY, "i1", "one", attached=True)
        await shared_store.put(dataclasses.replace(closing, phase="closed", closed_at=3.0), expected_version=2)
        assert not await shared_store.hold(KEY, "i1", "one", attached=True)

    async def test_of_those_that_leave_the_last_one_gets_through(self, shared_store: SharedStore) -> None:
        record = await shared_store.put(record_of(), expected_version=None)
        closing = dataclasses.replace(record, phase="closing")
        for replica in ("one", "two", "three"):
            await shared_store.beat(replica, 60, {})
            assert await shared_store.hold(KEY, "i1", replica, attached=replica != "three")
        assert await shared_store.hold(KEY, "i1", "dead", attached=True)
        with pytest.raises(SessionHeld):
            await shared_store.put_alone(closing, expected_version=1, replica="one")
        assert await shared_store.get(KEY) == record
        assert await shared_store.holders(KEY) == {"two": True, "three": False}
        with pytest.raises(StoreConflict) as caught:
            await shared_store.put_alone(closing, expected_version=7, replica="two")
        assert not isinstance(caught.value, SessionHeld)
        won = await shared_store.put_alone(closing, expected_version=1, replica="two")
        assert (won.phase, won.version) == ("closing", 2)

    async def test_of_many_that_leave_at_once_exactly_one_closes(self, shared_store: SharedStore) -> None:
        record = await shared_store.put(record_of(), expected_version=None)
        closing = dataclasses.replace(record, phase="closing")
        for number in range(8):
            await shared_store.beat(str(number), 60, {})
            await shared_store.hold(KEY, "i1", str(number), attached=True)
        leaving = (shared_store.put_alone(closing, expected_version=1, replica=str(number)) for number in range(8))
        answers = await asyncio.gather(*leaving, return_exceptions=True)
        assert sum(isinstance(answer, SessionRecord) for answer in answers) == 1
        assert sum(isinstance(answer, SessionHeld) for answer in answers) == 7

    async def test_every_write_of_a_resource_raises_its_version(self, shared_store: SharedStore) -> None:
        written = await shared_store.put(record_of(), expected_version=None)
        assert await shared_store.parts_version(KEY, "browser") == 0
        for number in range(3):
            await shared_store.put_parts(KEY, "browser", {"n": str(number).encode()})
        await shared_store.put_parts(KEY, "other", {"n": b""})
        assert await shared_store.parts_version(KEY, "browser") == 3
        await shared_store.put(dataclasses.replace(written, closed_at=3.0, phase="closed"), expected_version=1)
        assert await shared_store.parts_version(KEY, "browser") == 0
