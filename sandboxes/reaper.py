"""What is over: sessions that are idle, too old or abandoned, sandboxes that nobody claims, old rows of the ledger.

Above: `manager`. Below: `keeper`, `pool`, `clock`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from sandboxes.calls import Calls
from sandboxes.census import Census
from sandboxes.keeper import Keeper
from sandboxes.lifecycle import LIVE, OVER, CloseReason, Phase
from sandboxes.pool import Pool
from sandboxes.session import Session
from sandboxes.settings import ManagerSettings
from sandboxes.spec import Retention
from sandboxes.starter import Starter

PRUNE_S = 600.0


def due(session: Session, now: float, settings: ManagerSettings) -> CloseReason | None:
    """Why a session should be closed now, if it should. Pure."""
    if session.phase in OVER:
        return None
    if now >= session.record.created_at + settings.lifetime_s:
        return CloseReason.LIFETIME
    if not session.attached and session.grace_until is not None and now >= session.grace_until:
        return CloseReason.DISCONNECT
    idle_s = settings.idle_s if session.record.ttl_s is None else session.record.ttl_s
    if not session.busy and now >= session.used_at + idle_s:
        return CloseReason.IDLE
    return None


def eviction_order(
    sessions: Iterable[Session],
    principal: str,
    *,
    capped: bool,
    now: float,
    settings: ManagerSettings,
    fair_share: float,
) -> list[Session]:
    """Which sessions may be closed so that `principal` gets a place, best first. Pure.

    Never one that runs, or was used within `evict_after_s` (retained: `evict_retained_after_s`). First its own: those
    of requests and connections, then chosen ones, each least recently used first. When it is the total that is reached,
    then those of principals that hold more than a fair share, in the same order. Its own retained ones come last, and
    another's never: behind one inference server all users may be one principal, and who retains means to come back.
    """
    rank = {Retention.REQUEST: 0, Retention.CONNECTION: 0, Retention.CHOSEN: 1}
    held: dict[str, int] = {}
    candidates = []
    for session in sessions:
        if session.slot is None:
            continue
        held[session.key.principal] = held.get(session.key.principal, 0) + 1
        retained = session.retention is Retention.RETAINED
        rested = now - session.used_at >= (settings.evict_retained_after_s if retained else settings.evict_after_s)
        if session.phase is Phase.IDLE and not session.busy and rested:
            candidates.append(session)

    def allowed(session: Session) -> bool:
        if session.key.principal == principal:
            return True
        greedy = held[session.key.principal] > fair_share
        return not capped and greedy and session.retention is not Retention.RETAINED

    return sorted(
        filter(allowed, candidates),
        key=lambda s: (
            s.retention is Retention.RETAINED,
            s.key.principal != principal,
            rank.get(s.retention, 0),
            s.used_at,
        ),
    )


class Reaper:
    """Sweeps by the clock until it is stopped. One sweep's failure is observed, and the next comes all the same."""

    def __init__(
        self, keeper: Keeper, pool: Pool, starter: Starter, calls: Calls, census: Census | None = None
    ) -> None:
        """`census`: where several hosts share sandboxes."""
        self._keeper = keeper
        self._pool = pool
        self._starter = starter
        self._calls = calls
        self._census = census
        self._orphans_at = keeper.clock.now() + keeper.settings.orphan_sweep_s
        self._prune_at = keeper.clock.now()
        self._suspects: set[str] = set()

    async def run(self) -> None:
        keeper = self._keeper
        while True:
            await keeper.clock.sleep(keeper.settings.sweep_s)
            try:
                await self.sweep()
            except Exception as error:  # noqa: BLE001  # whatever goes wrong in one sweep, the others come
                keeper.observer.failed("sweep", error)

    async def sweep(self) -> None:
        """One round. Raises SandboxError of what is down; what is not done is done by a later round."""
        keeper = self._keeper
        now = keeper.clock.now()
        for session in list(keeper.sessions.values()):
            reason = due(session, now, keeper.settings)
            if self._census is not None:
                await self._census.settle(session)
            if reason is not None:
                keeper.close(session, reason)
            elif session.astray and session.phase is Phase.IDLE and not session.busy:
                attempt_id = next(
                    iter(session.astray)
                )  # the oldest: one that fails again is put back behind the others
                cancelled = session.astray.pop(attempt_id)
                self._calls.take_over(session, attempt_id, "", now, cancelled=cancelled)
            keeper.save_soon(session)
        await self._settle_late()
        if now >= self._orphans_at:
            self._orphans_at = now + keeper.settings.orphan_sweep_s
            await self._retry_doomed()
            if self._census is None:
                await self.remove_orphans()
            else:
                await self._census.take(now)
            await self._check_all()
        if now >= self._prune_at:
            self._prune_at = now + PRUNE_S
            await keeper.store.prune(
                closed_before=now - keeper.settings.audit_s, outcomes_before=now - keeper.settings.outcomes_kept_s
            )

    async def remove_orphans(self) -> None:
        """Ends sandboxes of this owner that nothing here knows.

        An orphan must be one in two rounds: a sandbox that is just being launched is listed before it is known.
        """
        keeper = self._keeper
        owned = {handle.sandbox_id: handle for handle in await keeper.engine.list_owned()}
        known = self._known()
        orphans = {ident: handle for ident, handle in owned.items() if ident not in known and handle.key not in known}
        for ident in self._suspects & orphans.keys():
            workspaces = {session.record.workspace for session in keeper.sessions.values()}
            handle = orphans[ident]
            await keeper.engine.destroy(handle, keep_workspace=handle.workspace in workspaces)
        self._suspects = set(orphans) - self._suspects

    # --- inside ------------------------------------------------------------------------------------------------------

    def _known(self) -> set[str]:
        keeper = self._keeper
        known = {s.sandbox.handle.sandbox_id for s in keeper.sessions.values() if s.sandbox is not None}
        return known | self._pool.names | keeper.busy_ids | keeper.doomed.keys()

    async def _check_all(self) -> None:
        """Loses the sandboxes of sessions that are not there any more."""
        found = [(session, session.sandbox) for session in self._keeper.sessions.values() if session.phase in LIVE]
        await asyncio.gather(*(self._starter.examine(session, sandbox) for session, sandbox in found if sandbox))

    async def _retry_doomed(self) -> None:
        keeper = self._keeper
        for ident, (handle, keep_workspace) in list(keeper.doomed.items()):
            await keeper.engine.destroy(handle, keep_workspace=keep_workspace)
            keeper.doomed.pop(ident, None)

    async def _settle_late(self) -> None:
        """Outcomes and records that the store could not take."""
        keeper = self._keeper
        for session in list(keeper.unsaved):
            await keeper.save(session)
            keeper.unsaved.remove(session)
        for session in list(keeper.sessions.values()):
            for run in list(session.runs.values()):
                if run.outcome is not None and run.task is not None and run.task.done():
                    keeper.settle_soon(session, run)
        await keeper.settled()
