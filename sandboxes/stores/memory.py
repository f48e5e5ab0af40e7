"""A store that lives as long as its object: for tests, and for hosts that keep nothing. Hosts of one process may share
it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from sandboxes.errors import SessionHeld, StoreConflict
from sandboxes.lifecycle import Phase
from sandboxes.spec import SessionKey
from sandboxes.stores.base import AttemptRecord, SessionFilter, SessionRecord, SharedStore


class MemoryStore(SharedStore):
    """Dictionaries. Nothing in it waits, so every method is atomic on the event loop. `clock`: seconds, for beats."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beats: dict[str, tuple[float, Mapping[str, object]]] = {}
        self._holds: dict[SessionKey, dict[str, bool]] = {}
        self._versions: dict[tuple[SessionKey, str], int] = {}
        self._sessions: dict[SessionKey, list[SessionRecord]] = {}
        self._attempts: dict[tuple[SessionKey, str], AttemptRecord] = {}
        self._resources: dict[SessionKey, dict[str, dict[str, bytes]]] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def get(self, key: SessionKey) -> SessionRecord | None:
        records = self._sessions.get(key)
        return records[-1] if records else None

    async def put(self, record: SessionRecord, *, expected_version: int | None) -> SessionRecord:
        records = self._sessions.setdefault(record.key, [])
        newest = records[-1] if records else None
        if expected_version is None:
            if newest is not None and newest.closed_at is None:
                raise StoreConflict("the session is already open", session=str(record.key))
            written = dataclasses.replace(record, version=1)
            records.append(written)
        else:
            if newest is None or newest.incarnation != record.incarnation or newest.version != expected_version:
                raise StoreConflict("the session was written by somebody else", session=str(record.key))
            written = dataclasses.replace(record, version=expected_version + 1)
            records[-1] = written
        if written.closed_at is not None:
            self._holds.pop(record.key, None)
            for name in self._resources.pop(record.key, {}):
                self._versions.pop((record.key, name), None)
        return written

    async def list(self, which: SessionFilter) -> Sequence[SessionRecord]:
        found = [record for records in self._sessions.values() for record in records if which.matches(record)]
        found.sort(key=lambda record: (-record.last_used_at, record.incarnation))
        return found[: which.limit]

    async def register(self, attempt: AttemptRecord) -> AttemptRecord:
        return self._attempts.setdefault((attempt.session, attempt.attempt_id), attempt)

    async def settle(self, *attempts: AttemptRecord) -> None:
        if any(attempt.outcome is None for attempt in attempts):
            raise ValueError("an attempt is settled with an outcome")
        for attempt in attempts:
            known = self._attempts.setdefault((attempt.session, attempt.attempt_id), attempt)
            if known.receipt is None and attempt.outcome is not None:
                settled = dataclasses.replace(known, outcome=attempt.outcome, receipt=attempt.outcome.receipt)
                self._attempts[attempt.session, attempt.attempt_id] = settled

    async def attempt(self, key: SessionKey, attempt_id: str) -> AttemptRecord | None:
        return self._attempts.get((key, attempt_id))

    async def attempts(self, key: SessionKey, *, limit: int = 100, unsettled: bool = False) -> Sequence[AttemptRecord]:
        found = [
            attempt
            for attempt in self._attempts.values()
            if attempt.session == key and not (unsettled and attempt.receipt is not None)
        ]
        found.sort(key=lambda attempt: (-attempt.registered_at, attempt.attempt_id))
        return found[:limit]

    async def put_parts(self, key: SessionKey, resource: str, parts: Mapping[str, bytes | None]) -> None:
        kept = self._resources.setdefault(key, {}).setdefault(resource, {})
        self._versions[key, resource] = self._versions.get((key, resource), 0) + 1
        for name, state in parts.items():
            if state is None:
                kept.pop(name, None)
            else:
                kept[name] = state

    async def get_parts(self, key: SessionKey, resource: str) -> Mapping[str, bytes]:
        return dict(self._resources.get(key, {}).get(resource, {}))

    async def prune(self, *, closed_before: float, outcomes_before: float) -> int:
        rows = 0
        gone: set[str] = set()
        for key, records in list(self._sessions.items()):
            kept = [record for record in records if record.closed_at is None or record.closed_at >= closed_before]
            gone.update(record.incarnation for record in records if record not in kept)
            rows += len(records) - len(kept)
            self._sessions[key] = kept
            if not kept:
                del self._sessions[key]
        for at, attempt in list(self._attempts.items()):
            if attempt.incarnation in gone:
                del self._attempts[at]
                rows += 1
            elif attempt.outcome is not None and attempt.outcome.receipt.ended_at < outcomes_before:
                self._attempts[at] = dataclasses.replace(attempt, outcome=None, pruned=True)
                rows += 1
        return rows

    # --- several hosts -----------------------------------------------------------------------------------------------

    async def beat(self, replica: str, ttl_s: float, said: Mapping[str, object]) -> bool:
        lived = replica in await self.replicas()
        self._beats[replica] = (self._clock() + ttl_s, dict(said))
        return lived

    async def leave(self, replica: str) -> None:
        self._beats.pop(replica, None)

    async def replicas(self) -> Mapping[str, Mapping[str, object]]:
        now = self._clock()
        self._beats = {replica: beat for replica, beat in self._beats.items() if beat[0] > now}
        return {replica: said for replica, (_, said) in self._beats.items()}

    async def hold(self, key: SessionKey, incarnation: str, replica: str, *, attached: bool) -> bool:
        newest = await self.get(key)
        if newest is None or newest.incarnation != incarnation or newest.phase in (Phase.CLOSING, Phase.CLOSED):
            return False
        self._holds.setdefault(key, {})[replica] = attached
        return True

    async def release(self, key: SessionKey, replica: str) -> None:
        self._holds.get(key, {}).pop(replica, None)

    async def holders(self, key: SessionKey, *, dead: bool = False) -> Mapping[str, bool]:
        living = await self.replicas()
        holds = self._holds.get(key, {})
        return {replica: attached for replica, attached in holds.items() if (replica in living) is not dead}

    async def put_alone(self, record: SessionRecord, *, expected_version: int, replica: str) -> SessionRecord:
        await self.release(record.key, replica)
        if any((await self.holders(record.key)).values()):
            raise SessionHeld("another host has the session in use", session=str(record.key))
        return await self.put(record, expected_version=expected_version)

    async def parts_version(self, key: SessionKey, resource: str) -> int:
        return self._versions.get((key, resource), 0)
