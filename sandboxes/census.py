"""What the store and the backend have in all, where several hosts share both: compared, and what is nobody's is ended.

Above: `reaper`. Below: `keeper`, `calls`, `replicas`.

Every replica takes the census for itself, now and then. Whatever it does is done by compare-and-set or twice without
harm, so that it does not matter which one is first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sandboxes.calls import Calls
from sandboxes.errors import SandboxError
from sandboxes.keeper import Keeper
from sandboxes.lifecycle import OVER, CloseReason, Phase
from sandboxes.pool import Pool
from sandboxes.records import over
from sandboxes.replicas import MISSED_BEATS, Replica
from sandboxes.session import Session
from sandboxes.settings import ManagerSettings
from sandboxes.spec import Handle, Retention
from sandboxes.starter import Starter, workspace_name
from sandboxes.stores.base import SessionFilter, SessionRecord

ALL = 1_000_000
USED_ELSEWHERE_S = 1.0  # later than here by so much, and the copy here is dropped


def due_record(record: SessionRecord, now: float, settings: ManagerSettings) -> CloseReason | None:
    """Why a session that no replica holds should be closed now, if it should. Pure."""
    if now >= record.created_at + settings.lifetime_s:
        return CloseReason.LIFETIME
    if record.retention in (Retention.REQUEST, Retention.CONNECTION) and now >= record.last_used_at + settings.grace_s:
        return CloseReason.DISCONNECT
    if now >= record.last_used_at + (settings.idle_s if record.ttl_s is None else record.ttl_s):
        return CloseReason.IDLE
    return None


class Census:
    """See the module."""

    def __init__(self, keeper: Keeper, pool: Pool, starter: Starter, calls: Calls, replica: Replica) -> None:
        self._keeper = keeper
        self._pool = pool
        self._starter = starter
        self._calls = calls
        self._replica = replica
        self._suspects: set[str] = set()
        self._closing: set[str] = set()

    async def settle(self, session: Session) -> None:
        """What a copy in memory needs by the second. Raises StoreUnavailable."""
        if session.busy:
            session.touch(self._keeper.clock.now())  # what runs for long here is not idle to the others
        if session.dirty:
            await self._keeper.save(session)  # first: when it was used last is seen before that it is not held
        await self._replica.settle_hold(session)

    async def take(self, now: float) -> None:
        """Raises SandboxError of what is down; the next one does the rest."""
        owned = await self._keeper.engine.list_owned()  # first: what is launched is on record before
        records = {record.incarnation: record for record in await self._keeper.store.list(SessionFilter(limit=ALL))}
        living = await self._replica.living()
        for session in list(self._keeper.sessions.values()):
            await self._compare(session, records.get(session.record.incarnation))
        for record in records.values():
            await self._look_after(record, now)
        self._closing = {record.incarnation for record in records.values() if over(record)}
        await self._remove_orphans(owned, list(records.values()), living, now)

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def _compare(self, session: Session, stored: SessionRecord | None) -> None:
        """A copy in memory with what is on record."""
        if session.phase in OVER:
            return
        if stored is None:
            await self._replica.reload(session)
            return
        if not session.saving.locked():
            self._replica.take_in(session, stored)
        if session.phase in OVER or session.busy:
            return
        if not session.attached and stored.last_used_at > session.here_at + USED_ELSEWHERE_S:
            self._keeper.drop(session)
            return
        session.unclear = session.unclear or await self._replica.abandoned(session)
        if session.unclear and session.phase is Phase.IDLE and session.sandbox is not None:
            await session.sandbox.close()  # to hear anew what it has
            await self._starter.reached(session)
            await self._calls.clear_up(session)

    async def _look_after(self, record: SessionRecord, now: float) -> None:
        """A session that no replica may have in memory any more."""
        keeper = self._keeper
        if record.key in keeper.sessions:
            return
        if over(record):
            if record.incarnation in self._closing:  # since the last time: who closed it has died over it
                keeper.spawn(keeper.finish_closing(record), "close")
            return
        reason = due_record(record, now, keeper.settings)
        if reason is not None:
            session = keeper.take_up(record)
            keeper.close(session, reason)

    # --- sandboxes ---------------------------------------------------------------------------------------------------

    async def _remove_orphans(
        self,
        owned: Sequence[Handle],
        records: Sequence[SessionRecord],
        living: Mapping[str, Mapping[str, object]],
        now: float,
    ) -> None:
        """Ends sandboxes that no session and no living replica has: in two rounds, and older than a launch takes."""
        keeper, settings = self._keeper, self._keeper.settings
        known = {record.handle.sandbox_id for record in records if record.handle is not None}
        starting = {
            workspace_name(record)
            for record in records
            if over(record) or (record.handle is None and await self._replica.held(record.key))
        }
        pooled = {str(name) for said in living.values() for name in _names(said.get("pool"))} | self._pool.names
        spared = known | starting | pooled | keeper.busy_ids | keeper.doomed.keys()
        young = now - settings.launch_s - settings.beat_s * MISSED_BEATS
        orphans = {
            handle.sandbox_id: handle
            for handle in owned
            if handle.sandbox_id not in spared and handle.key not in spared and handle.created_at < young
        }
        used = {record.workspace for record in records} | {workspace_name(record) for record in records}
        for ident in self._suspects & orphans.keys():
            handle = orphans[ident]
            try:
                await keeper.engine.destroy(handle, keep_workspace=handle.workspace in used)
            except SandboxError as error:
                keeper.observer.failed("destroy", error)
        self._suspects = set(orphans)


def _names(value: object) -> list[object]:
    return value if isinstance(value, list) else []
