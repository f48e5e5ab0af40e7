"""Sessions by key: opening, saving, losing and closing them, and the background tasks that do it.

Above: `manager`, `calls`, `adoption`, `reaper`. Below: `session`, `lifecycle`, `engine`, `admission`, the store.

What the store knows of a session is enough to begin again: its record is committed before anything is launched for
it; later changes are written in the background, because the agent's ticket, epoch and sequence say the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Coroutine, Sequence

from sandboxes.admission import Admission
from sandboxes.clock import Clock
from sandboxes.engine import Engine
from sandboxes.errors import NoCapacity, SandboxError, StoreConflict, StoreUnavailable
from sandboxes.lifecycle import LIVE, OVER, Changed, CloseReason, Phase, Transition
from sandboxes.observer import Observer
from sandboxes.owner import Owner
from sandboxes.receipts import lost_outcome
from sandboxes.records import Records, lost_fate, newest_phase, over
from sandboxes.sandbox import Sandbox
from sandboxes.session import Run, Session
from sandboxes.settings import ManagerSettings
from sandboxes.spec import Handle, Retention, SessionKey, SessionRequest
from sandboxes.stores.base import AttemptRecord, SessionRecord, Store

# Outcomes of so long share one commit, unless somebody waits for it or a session has so many: those of one session
# are on one page of the ledger, which is written anew by each commit. Until then the agents have them too.
SETTLE_DELAY_S = 0.2
SETTLE_AT = 24
CLOSING_S = 5.0  # another host's closing of a session is waited for so long, then finished by this one
CLOSING_POLL_S = 0.02
MAX_LATE = 64  # outcomes of one session that wait in memory for a store that cannot be written

WHY_CLOSED = {
    CloseReason.CLEANUP: "its client cleaned it up",
    CloseReason.IDLE: "it had been idle for too long",
    CloseReason.LIFETIME: "it had reached its maximum lifetime",
    CloseReason.OPERATOR: "the operator closed it",
    CloseReason.EVICTED: "it made room for others while it was idle",
    CloseReason.DISCONNECT: "its client had gone",
    CloseReason.FAILED: "it had failed",
    CloseReason.SHUTDOWN: "the tool host was stopped",
}


class Keeper:
    """Shared by the manager's parts. `doomed`: sandboxes whose end failed; sweeps try again."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: Store,
        records: Records,
        owner: Owner,
        settings: ManagerSettings,
        clock: Clock,
        observer: Observer,
        admission: Admission,
    ) -> None:
        self.engine = engine
        self.store = store
        self.records = records
        self.owner = owner
        self.settings = settings
        self.clock = clock
        self.observer = observer
        self.admission = admission
        self.sessions: dict[SessionKey, Session] = {}
        self.unsaved: list[Session] = []  # closed, and the store could not be told yet
        self.doomed: dict[str, tuple[Handle, bool]] = {}  # by sandbox id; whether its workspace is kept
        self.busy_ids: set[str] = set()  # launch keys and sandbox ids that are no session's yet: not orphans
        self._opening: dict[SessionKey, asyncio.Task[Session]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._unsettled: dict[int, tuple[Session, Run]] = {}  # by the run's identity
        self._settling: asyncio.Task[None] | None = None
        self._settle_now = asyncio.Event()

    # --- background tasks --------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[None, None, object], name: str) -> asyncio.Task[object]:
        """A task that is not forgotten. What it raises is observed, never lost."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.observer.failed(task.get_name(), error)

    async def drain(self, bound_s: float) -> None:
        """Waits for the background tasks, then cancels what is left."""
        await self.settled()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=bound_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- opening -----------------------------------------------------------------------------------------------------

    async def open(self, request: SessionRequest) -> Session:
        """The open session of a key, made when there is none; one that is closing is waited for.

        Raises StoreUnavailable, NoCapacity (too many open records).
        """
        while True:
            session = self.sessions.get(request.key)
            if session is None:
                task = self._opening.get(request.key)
                if task is None:
                    task = asyncio.create_task(self._open(request), name="open-session")
                    self._opening[request.key] = task
                    task.add_done_callback(lambda done: self._opened(request.key, done))
                session = await asyncio.shield(task)
            if session.phase not in OVER:
                self._narrow(session, request)
                return session
            await session.closed.wait()

    def _narrow(self, session: Session, request: SessionRequest) -> None:
        """A later connection may shorten the time to live that an earlier one asked for, or set the first one."""
        asked, known = self.bounded_ttl(request), session.record.ttl_s
        if asked is not None and (known is None or asked < known):
            session.update(ttl_s=asked)

    def _opened(self, key: SessionKey, task: asyncio.Task[Session]) -> None:
        self._opening.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it; if nobody does any more, it is of no interest

    async def _open(self, request: SessionRequest) -> Session:
        if len(self.sessions) >= self.settings.max_records:
            raise NoCapacity(f"at capacity: {len(self.sessions)} sessions are open; try again later", retry_after_s=30)
        for unsaved in [session for session in self.unsaved if session.key == request.key]:
            await self.save(unsaved)
        if self.records.shared:
            return await self._open_shared(request)
        earlier = await self.store.get(request.key)
        if earlier is not None and earlier.closed_at is None:
            record = dataclasses.replace(earlier, phase=Phase.LOST.value, handle=None)
        else:
            record = self._new_record(request, earlier)
        session = Session(record, self._changed)
        session.dirty = True
        await self.save(session)
        self.sessions[request.key] = session
        return session

    def _new_record(self, request: SessionRequest, earlier: SessionRecord | None) -> SessionRecord:
        lost_reason = None
        if earlier is not None and (earlier.epoch or earlier.calls):
            lost_reason = self._why_gone(earlier)
        elif earlier is not None:  # it ran nothing, and may have been closed before it could tell of one before it
            lost_reason = earlier.lost_reason
        now = self.clock.now()
        return SessionRecord(
            key=request.key,
            retention=request.retention,
            phase=Phase.NEW.value,
            incarnation=secrets.token_hex(12),
            created_at=now,
            last_used_at=now,
            ttl_s=self.bounded_ttl(request),
            lost_reason=lost_reason,
        )

    # --- opening, where other hosts may have the session, too --------------------------------------------------------

    async def _open_shared(self, request: SessionRequest) -> Session:
        waited = 0.0
        while True:
            earlier = await self.store.get(request.key)
            if (session := self.sessions.get(request.key)) is not None:
                return session
            if earlier is not None and not over(earlier):
                return self.take_up(earlier)
            if earlier is not None and earlier.closed_at is None:
                if waited >= CLOSING_S:  # whoever closed it has died over it
                    await self.finish_closing(earlier)
                await asyncio.sleep(CLOSING_POLL_S)
                waited += CLOSING_POLL_S
                continue
            try:
                written = await self.store.put(self._new_record(request, earlier), expected_version=None)
            except StoreConflict:
                continue  # another host was faster: that one's session is this one
            if request.key not in self.sessions:  # `reach` may have found it already
                self.sessions[request.key] = Session(written, self._changed)
            return self.sessions[request.key]

    async def reach(self, key: SessionKey) -> Session | None:
        """The open session of a key, also one that this host does not have yet; None when there is none.

        Raises StoreUnavailable.
        """
        session = self.sessions.get(key)
        if session is None and self.records.shared:
            record = await self.store.get(key)
            session = self.sessions.get(key)
            if session is None and record is not None and not over(record):
                return self.take_up(record)
        return session if session is not None and session.phase not in OVER else None

    def take_up(self, record: SessionRecord) -> Session:
        """A copy of a session that another host has opened."""
        session = self.adopt(dataclasses.replace(record, phase=newest_phase(record).value))
        session.stored = record
        session.unclear = True
        self.run_on(session, record.handle)
        return session

    def run_on(self, session: Session, handle: Handle | None) -> None:
        """The session's sandbox is this one, which is not connected yet."""
        session.sandbox = None if handle is None else Sandbox(self.engine, handle)
        if handle is not None and session.slot is None:
            session.slot = self.admission.adopt(session.key.principal)

    async def finish_closing(self, record: SessionRecord) -> None:
        """Closes what another host, which died over it, had begun to close."""
        session = Session(dataclasses.replace(record, phase=Phase.LOST.value), self._changed)
        session.stored, session.ends = record, True
        try:
            reason = CloseReason(record.close_reason or "")
        except ValueError:
            reason = CloseReason.FAILED
        self._begin_closing(session, reason)
        await session.closed.wait()

    def drop(self, session: Session) -> None:
        """This copy is not needed here any more; the session goes on elsewhere."""
        if session.dropped or session.phase in OVER:
            return
        session.dropped = True
        if self.sessions.get(session.key) is session:
            del self.sessions[session.key]
        self.spawn(self._drop(session), "drop")

    async def _drop(self, session: Session) -> None:
        self.release(session)
        for resource in list(session.resources.values()):
            await resource.close()
        if session.sandbox is not None:
            session.sandbox.on_lost = None
            await session.sandbox.close()
        if session.dirty:
            await self.save(session)

    def ended_elsewhere(self, session: Session, theirs: SessionRecord) -> None:
        """Another host closes this session, or has closed it."""
        if session.phase in OVER or session.dropped:
            return
        session.ends = False
        try:
            reason = CloseReason(theirs.close_reason or "")
        except ValueError:
            reason = CloseReason.FAILED
        self._begin_closing(session, reason)

    def bounded_ttl(self, request: SessionRequest) -> float | None:
        """The idle time that a request may have: it narrows, within the operator's maximum."""
        if request.ttl_s is None or request.retention is not Retention.RETAINED:
            return None
        return min(max(request.ttl_s, 1.0), self.settings.max_idle_s)

    def _why_gone(self, earlier: SessionRecord) -> str:
        try:
            why = WHY_CLOSED[CloseReason(earlier.close_reason or "")]
        except ValueError:
            why = "it had ended"
        return f"the earlier session of this id was closed because {why}; its variables and files are gone"

    def adopt(self, record: SessionRecord) -> Session:
        """Takes an open record up again at start."""
        session = self.sessions[record.key] = Session(record, self._changed)
        return session

    def _changed(self, session: Session, changed: Changed) -> None:
        self.observer.session_changed(session.key, changed)

    # --- saving ------------------------------------------------------------------------------------------------------

    async def save(self, session: Session) -> None:
        """Commits the record if it changed. Raises StoreUnavailable, and then it is tried again later."""
        async with session.saving:
            while session.dirty:
                session.dirty = False
                try:
                    await self.records.write(session)
                except BaseException:
                    session.dirty = True
                    raise

    def save_soon(self, session: Session) -> None:
        if session.dirty and not session.saving.locked():
            self.spawn(self.save(session), "store")

    # --- losing ------------------------------------------------------------------------------------------------------

    def lose(self, session: Session, reason: str, *, tell: bool = True, error: SandboxError | None = None) -> None:
        """Its sandbox is gone, or cannot be trusted any more. Files are kept for the next one, unless `error` says that
        its node is gone as well.

        `tell`: the next outcome says so; else the one that is about to be returned does.
        """
        if session.phase not in LIVE and session.phase is not Phase.STARTING:
            return
        sandbox, session.sandbox = session.sandbox, None
        session.change(Transition.LOSE, reason)
        found = session.record.handle
        if (
            self.records.shared
            and sandbox is not None
            and found is not None
            and found.sandbox_id != sandbox.handle.sandbox_id
        ):
            tell = False  # another host has started a new one already, and has told
        else:
            session.update(handle=None)
        if tell:
            session.update(lost_reason=f"{reason}; {lost_fate(error)}")
        session.disposal = asyncio.create_task(self._dispose(session, sandbox), name="dispose")
        self.save_soon(session)

    async def _dispose(self, session: Session, sandbox: Sandbox | None) -> None:
        await self.settled()  # what was answered a moment ago is nowhere else any more
        session.losses_open = True
        try:
            if self.records.shared:
                await self.save(session)
            if session.phase in OVER and session.ends is False:
                sandbox = None  # it is ended with the session, elsewhere
            else:
                await self.settle_lost(session)
        except SandboxError as error:
            self.observer.failed("store", error)
        if sandbox is not None:
            await self.destroy(sandbox, keep_workspace=True)
        self.release(session)

    async def settle_lost(self, session: Session) -> None:
        """Attempts that the ledger has as running, in a sandbox that is gone, end as lost: also one that is being sent
        again just now. Raises StoreUnavailable; no other sandbox starts for the session before this has succeeded.

        While another host has the session in use they may be that one's, which does the same: then later.
        """
        unsettled = await self.store.attempts(session.key, limit=1000, unsettled=True)
        if unsettled and not await self.records.alone(session):
            session.unclear, unsettled = True, []
        for attempt in unsettled:
            run = session.runs.get(attempt.attempt_id)
            if run is None or not (run is session.running or run.fresh or run.outcome is not None):
                await self.store.settle(
                    dataclasses.replace(attempt, outcome=lost_outcome(session.record, attempt, self.clock.now()))
                )
        session.losses_open = False

    async def destroy(self, sandbox: Sandbox, *, keep_workspace: bool = False) -> None:
        """Ends a sandbox, now or by a later sweep. Never raises."""
        handle = sandbox.handle
        self.doomed[handle.sandbox_id] = (handle, keep_workspace)
        try:
            await sandbox.destroy(keep_workspace=keep_workspace)
        except SandboxError as error:
            self.observer.failed("destroy", error)
        else:
            self.doomed.pop(handle.sandbox_id, None)

    async def undo_doomed(self, launch_key: str) -> None:
        """Before a launch under a key: what is left of the last one must be gone. Raises EngineUnavailable."""
        for ident, (handle, keep_workspace) in list(self.doomed.items()):
            if handle.key == launch_key:
                await self.engine.destroy(handle, keep_workspace=keep_workspace)
                self.doomed.pop(ident, None)

    def release(self, session: Session) -> None:
        slot, session.slot = session.slot, None
        if slot is not None:
            self.admission.release(slot)

    # --- closing -----------------------------------------------------------------------------------------------------

    def close(self, session: Session, reason: CloseReason) -> bool:
        """Begins to close a session; whether this call did. `session.closed` is set when it is over."""
        if session.phase in OVER or session.dropped:
            return False
        if self.records.asks(session, reason):
            if session.leaving is None:
                session.leaving = self.spawn(self._leave(session, reason), "leave")
            return True
        self._begin_closing(session, reason)
        return True

    async def _leave(self, session: Session, reason: CloseReason) -> None:
        """Closes it if nobody else has it in use; else it is only not needed here any more."""
        try:
            closes = await self.records.leave(session, reason)
        except StoreUnavailable:
            if reason is not CloseReason.IDLE:
                session.grace_until = self.clock.now()  # a sweep tries again
            raise
        finally:
            session.leaving = None
        if session.phase in OVER:
            return
        if closes:
            session.ends = True
            self._begin_closing(session, reason)
        elif session.attached or session.busy:
            await self.records.settle_hold(session)
        else:
            self.drop(session)

    def _begin_closing(self, session: Session, reason: CloseReason) -> None:
        session.end_note = f"the session was closed because {WHY_CLOSED[reason]}"
        session.change(Transition.CLOSE, reason.value)
        session.update(close_reason=reason.value)
        self.spawn(self._close(session), "close")

    async def _close(self, session: Session) -> None:
        try:
            await self._end(session)
        finally:
            if self.sessions.get(session.key) is session:
                del self.sessions[session.key]
            session.closed.set()

    async def _end(self, session: Session) -> None:
        if not self.records.shared:
            self.save_soon(session)
        for run in session.queue:
            if run.task is not None and not run.registered:
                run.task.cancel()
        if session.ends is None:
            session.ends = await self._ends(session)
        sandbox, session.sandbox = session.sandbox, None
        if session.disposal is not None:
            await asyncio.gather(session.disposal, return_exceptions=True)
        handle = session.record.handle
        if self.records.shared and handle is not None and (sandbox is None or sandbox.handle != handle):
            if sandbox is not None:
                await sandbox.close()
            sandbox = Sandbox(self.engine, handle)
        if not session.ends:
            if sandbox is not None:
                await sandbox.close()
        elif sandbox is not None:
            await self.destroy(sandbox)
        elif session.record.workspace is not None:
            await self._remove_workspace(session.record.workspace)
        async with session.turn:  # a start or a call that was under way has seen that the session is over
            pass
        for resource in list(session.resources.values()):
            await resource.close()
        session.resources.clear()
        await self.settled()  # whoever asks the closed session for an outcome asks the ledger
        self.release(session)
        session.change(Transition.FINISH)
        if not session.ends:
            session.dirty = False
            return
        session.update(closed_at=self.clock.now(), handle=None)
        try:
            await self.save(session)
        except SandboxError as error:
            self.unsaved.append(session)
            self.observer.failed("store", error)

    async def _ends(self, session: Session) -> bool:
        """Whether this host ends what the session has. In doubt it does: to end something twice harms nobody."""
        try:
            return await self.records.closing(session)
        except SandboxError as error:
            self.observer.failed("store", error)
            return True

    async def _remove_workspace(self, workspace: str) -> None:
        for ident, (handle, _) in self.doomed.items():
            if handle.workspace == workspace:  # it goes with what could not be ended yet
                self.doomed[ident] = (handle, False)
                return
        try:
            await self.engine.remove_workspace(workspace)
        except SandboxError as error:
            self.observer.failed("destroy", error)

    # --- the ledger --------------------------------------------------------------------------------------------------

    def record_of(self, session: Session, run: Run) -> AttemptRecord:
        return AttemptRecord(
            session=session.key,
            incarnation=session.record.incarnation,
            attempt_id=run.attempt_id,
            digest=run.digest,
            registered_at=run.queued_at,
            outcome=run.outcome,
        )

    def settle_soon(self, session: Session, run: Run) -> None:
        """Commits an outcome with others of the next moment, after it has gone to its caller."""
        late = [other for other in session.runs.values() if other.outcome is not None]
        if len(late) > MAX_LATE:  # the store is down for long: the agent has them too
            session.runs.pop(late[0].attempt_id, None)
            session.astray[late[0].attempt_id] = ""
        self._unsettled.setdefault(id(run), (session, run))
        if len(late) >= SETTLE_AT:
            self._settle_now.set()
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle(), name="store")

    async def settled(self) -> None:
        """Returns when what `settle_soon` was given is committed, or could not be: a later sweep tries again."""
        for _ in range(2):  # one batch may be on its way; what is waited for is in it or in the next
            if self._settling is not None:
                self._settle_now.set()
                await asyncio.shield(self._settling)

    async def _settle(self) -> None:
        """Commits one batch. What ended meanwhile has its own delay: under load it would else be a batch for each."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_DELAY_S):
                    await self._settle_now.wait()
            self._settle_now.clear()
            batch, self._unsettled = self._unsettled, {}
            await self.settle(list(batch.values()))
        except SandboxError as error:
            self.observer.failed("store", error)
        except BaseException:
            self._settling = None
            raise
        self._settling = asyncio.create_task(self._settle(), name="store") if self._unsettled else None

    async def settle(self, batch: Sequence[tuple[Session, Run]]) -> None:
        """Commits outcomes, then lets the agents forget them. Raises StoreUnavailable; they stay in memory then."""
        sandboxes = [session.sandbox for session, _ in batch]
        await self.store.settle(*(self.record_of(session, run) for session, run in batch))
        for (session, run), sandbox in zip(batch, sandboxes, strict=True):
            session.runs.pop(run.attempt_id, None)
            if sandbox is not None:
                sandbox.acknowledge(run.attempt_id)
