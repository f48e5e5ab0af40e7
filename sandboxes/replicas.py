"""Several hosts (replicas) over one store and one backend: who lives, who uses which session, and who may close it.

Above: `keeper`, `manager`. Below: `records`, `session`, a SharedStore.

What a replica has in memory of a session is a copy. The store says whether the session is open and what it runs on, by
compare-and-set; the agent says its epoch, its sequence and what runs. A replica *holds* a session in the store from
before its first call there until no connection is attached and nothing runs, so that none closes what another uses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Mapping

from sandboxes.clock import Clock
from sandboxes.errors import SandboxError, SessionHeld, StoreConflict
from sandboxes.lifecycle import OVER, CloseReason, Phase
from sandboxes.observer import Observer
from sandboxes.records import Records, merged, over
from sandboxes.session import Session
from sandboxes.spec import Handle, SessionKey
from sandboxes.stores.base import SessionRecord, SharedStore

TRIES = 50  # of a compare-and-set; each failure is another replica's success
MISSED_BEATS = 5  # so many, and a replica counts as dead
RELEASE_S = 2.0

OF_REST = frozenset({CloseReason.IDLE, CloseReason.EVICTED})  # off, if another replica has used the session since
# Off, if another replica has connections attached to it.
OF_CONNECTIONS = frozenset({CloseReason.CLEANUP, CloseReason.DISCONNECT, CloseReason.SHUTDOWN})


class Replica(Records):
    """This host among others. `on_over` hears of a session that another one closes. `rested_s`: the least rest after
    which sessions are closed, and some to spare."""

    shared = True

    def __init__(self, store: SharedStore, observer: Observer, clock: Clock, *, beat_s: float, rested_s: float) -> None:
        super().__init__(store)
        self.name = secrets.token_hex(8)
        self.on_over: Callable[[Session, SessionRecord], None] = lambda session, theirs: None
        self._shared = store
        self._observer = observer
        self._clock = clock
        self._beat_s = beat_s
        self._rested_s = rested_s
        self._beating: asyncio.Task[None] | None = None

    # --- records -----------------------------------------------------------------------------------------------------

    async def write(self, session: Session) -> None:
        mine = session.current()
        written = await self._commit(session, mine)
        if written is not None:
            self._take(session, mine, written)

    async def reload(self, session: Session) -> bool:
        async with session.saving:
            stored = await self._shared.get(session.key)
            if stored is not None and session.phase not in OVER:
                self.take_in(session, stored)
        return session.phase not in OVER

    def take_in(self, session: Session, stored: SessionRecord) -> None:
        """What the store has of the session, or of a later one of its key. Only while nobody writes it (`saving`)."""
        if stored.incarnation != session.record.incarnation or over(stored):
            if session.phase not in OVER:
                self.on_over(session, stored)
        elif stored.version > session.stored.version:
            mine = session.current()
            self._take(session, mine, merged(session.stored, mine, stored))
            session.stored = stored

    async def looked(self, session: Session, error: SandboxError) -> None:
        try:
            await self.reload(session)
        except SandboxError as failure:
            self._observer.failed("store", failure)

    async def started(self, session: Session, handle: Handle, **fields: object) -> Handle | None:
        """Commits what the session runs on from now on. None: it is over. Another handle than the given one: another
        replica was faster, and its sandbox is the session's. Raises StoreUnavailable."""
        async with session.saving:
            return await self._started(session, handle, **fields)

    async def _started(self, session: Session, handle: Handle, **fields: object) -> Handle | None:
        here = session.current()

        def beaten(theirs: SessionRecord) -> bool:
            found = theirs.handle
            return found is not None and found.sandbox_id not in (handle.sandbox_id, session.gone)

        def with_it(record: SessionRecord) -> SessionRecord:
            return dataclasses.replace(record, handle=handle, phase=Phase.IDLE.value, **fields)  # type: ignore[arg-type]

        written = await self._commit(session, here, with_it, beaten)
        if written is None:
            return None
        self._take(session, here, written)
        return written.handle

    async def _commit(
        self,
        session: Session,
        mine: SessionRecord,
        change: Callable[[SessionRecord], SessionRecord] = lambda record: record,
        unless: Callable[[SessionRecord], bool] = lambda theirs: False,
    ) -> SessionRecord | None:
        """Writes `mine` on top of whatever others have written since, and `change` on top of that, `unless` theirs is
        to stand. None when the session is over elsewhere."""
        base = session.stored
        if unless(base):
            return base
        wanted, expected = mine, base.version or None
        for _ in range(TRIES):
            try:
                session.stored = await self._shared.put(change(wanted), expected_version=expected)
                return session.stored
            except StoreConflict:
                theirs = await self._shared.get(session.key)
            if theirs is None:
                wanted, expected = mine, None  # the store has lost what it had; the session lives
                continue
            if theirs.incarnation != mine.incarnation or (over(theirs) and mine.closed_at is None):
                self.on_over(session, theirs)
                return None
            if theirs.closed_at is not None or unless(theirs):  # somebody else has finished it, or was faster
                session.stored = theirs
                return theirs
            wanted, expected = merged(base, mine, theirs), theirs.version
        raise StoreConflict("the session is being written by too many hosts; try again", session=str(session.key))

    def _take(self, session: Session, before: SessionRecord, now: SessionRecord) -> None:
        """The record in memory, which may have changed while the store was written."""
        session.record = merged(before, session.record, now) if not over(session.record) else session.record
        session.used_at = max(session.used_at, now.last_used_at)

    # --- who uses it -------------------------------------------------------------------------------------------------

    async def hold(self, session: Session) -> bool:
        try:
            if await self._held(session) and self._rested(session):
                session.touch(self._clock.now())
                async with session.saving:
                    await self.write(session)
        except SandboxError as error:
            self._observer.failed("store", error)  # what is live goes on without the store
        return session.phase not in OVER

    async def _held(self, session: Session) -> bool:
        attached = bool(session.attached)
        if session.held is not None and session.held >= attached:
            return session.phase not in OVER
        if await self._shared.hold(session.key, session.record.incarnation, self.name, attached=attached):
            session.held = attached
            return session.phase not in OVER
        await self.reload(session)
        if session.phase not in OVER:  # the store has lost what it had
            session.dirty = True
        return session.phase not in OVER

    def _rested(self, session: Session) -> bool:
        """Whether it was not used for so long that another replica may be about to close it: then a call is on record
        before it runs."""
        rested_s = min(self._rested_s, (session.record.ttl_s or self._rested_s) / 4)
        return self._clock.now() - session.stored.last_used_at >= rested_s

    async def settle_hold(self, session: Session) -> None:
        wanted = bool(session.attached) if session.attached or session.busy else None
        if session.phase in OVER or session.held == wanted:
            return
        if wanted is None:
            session.held = None
            await self._shared.release(session.key, self.name)
        else:
            session.held = None
            await self._held(session)

    async def living(self) -> Mapping[str, Mapping[str, object]]:
        """What the replicas that live say of themselves. Raises StoreUnavailable."""
        return await self._shared.replicas()

    async def alone(self, session: Session) -> bool:
        return not (await self._shared.holders(session.key)).keys() - {self.name}

    async def held(self, key: SessionKey) -> bool:
        """Whether any replica that lives has it in use. Raises StoreUnavailable."""
        return bool(await self._shared.holders(key))

    async def abandoned(self, session: Session) -> bool:
        """Whether a replica that held it is dead; told once. Raises StoreUnavailable."""
        dead = await self._shared.holders(session.key, dead=True)
        for replica in dead:
            await self._shared.release(session.key, replica)
        return bool(dead)

    # --- resources ---------------------------------------------------------------------------------------------------

    async def fresh(self, session: Session, resource: str) -> bool:
        version = await self._shared.parts_version(session.key, resource)
        known = session.versions.get(resource)
        session.versions[resource] = version
        return known == version

    def saved(self, session: Session, resource: str) -> None:
        session.versions[resource] = session.versions.get(resource, 0) + 1

    # --- closing -----------------------------------------------------------------------------------------------------

    def asks(self, session: Session, reason: CloseReason) -> bool:
        return reason in OF_REST or reason in OF_CONNECTIONS

    async def leave(self, session: Session, reason: CloseReason) -> bool:
        async with session.saving:
            return await self._leave(session, reason)

    async def _leave(self, session: Session, reason: CloseReason) -> bool:
        used_at = session.used_at
        for _ in range(TRIES):
            stored = await self._shared.get(session.key)
            if stored is None:
                return True
            self.take_in(session, stored)
            if session.phase in OVER or (reason in OF_REST and session.used_at > used_at):
                return False
            closing = dataclasses.replace(session.current(), phase=Phase.CLOSING.value, close_reason=reason.value)
            try:
                if reason in OF_REST:
                    session.stored = await self._shared.put(closing, expected_version=stored.version)
                else:
                    session.held = None
                    session.stored = await self._shared.put_alone(
                        closing, expected_version=stored.version, replica=self.name
                    )
                return True
            except SessionHeld:
                return False
            except StoreConflict:
                continue
        raise StoreConflict("the session is being written by too many hosts; try again", session=str(session.key))

    async def closing(self, session: Session) -> bool:
        async with session.saving:
            return await self._closing(session)

    async def _closing(self, session: Session) -> bool:
        mine = session.current()
        for _ in range(TRIES):
            try:
                session.stored = await self._shared.put(mine, expected_version=session.stored.version or None)
                return True
            except StoreConflict:
                theirs = await self._shared.get(session.key)
            if theirs is None:
                return True
            if theirs.incarnation != mine.incarnation or over(theirs):
                return False
            mine = merged(session.stored, mine, theirs)
            session.stored = theirs
            session.update(handle=mine.handle, workspace=mine.workspace, node=mine.node)
        raise StoreConflict("the session is being written by too many hosts; try again", session=str(session.key))

    # --- this replica itself -----------------------------------------------------------------------------------------

    async def join(self, said: Callable[[], Mapping[str, object]], sessions: Callable[[], list[Session]]) -> None:
        """Begins to beat. Raises StoreUnavailable."""
        await self._shared.beat(self.name, self._beat_s * MISSED_BEATS, said())
        self._beating = asyncio.create_task(self._beat(said, sessions), name="beat")

    async def part(self) -> None:
        """Stops beating: what this replica held, it holds no more. Never raises."""
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._shared.leave(self.name)
        except (SandboxError, TimeoutError) as error:
            self._observer.failed("store", error)

    async def _beat(self, said: Callable[[], Mapping[str, object]], sessions: Callable[[], list[Session]]) -> None:
        while True:
            await self._clock.sleep(self._beat_s)
            try:
                lived = await self._shared.beat(self.name, self._beat_s * MISSED_BEATS, said())
                if not lived:  # others took this one for dead, or the store has lost what it had
                    for session in sessions():
                        session.held = None
                        await self.settle_hold(session)
            except SandboxError as error:
                self._observer.failed("store", error)
