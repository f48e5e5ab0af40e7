"""Sessions for the host: keys and calls go in, outcomes come out.

Above: `toolhost` (namespaces, admin, files). Below: `calls`, `keeper`, `starter`, `pool`, `reaper`, `adoption`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import TypeVar

from sandboxes.admission import Admission
from sandboxes.adoption import Adopted, adopt
from sandboxes.backends.base import Backend
from sandboxes.calls import Calls, NotReached, kept
from sandboxes.census import Census
from sandboxes.clock import Clock, SystemClock
from sandboxes.engine import Engine
from sandboxes.errors import AttemptUnknown, CallRefused, SandboxError, SessionUnknown
from sandboxes.events import OnEvent
from sandboxes.files import SessionFiles
from sandboxes.health import Health
from sandboxes.joining import Joining
from sandboxes.keeper import Keeper
from sandboxes.lifecycle import LIVE, OVER, CloseReason, Phase
from sandboxes.observer import NullObserver, Observer
from sandboxes.owner import Owner
from sandboxes.pool import Pool
from sandboxes.reaper import Reaper, due, eviction_order
from sandboxes.records import Records
from sandboxes.replicas import Replica
from sandboxes.resources import Resource, ResourceFactory
from sandboxes.sandbox import Sandbox
from sandboxes.session import Run, Session, SessionInfo
from sandboxes.settings import ManagerSettings
from sandboxes.spec import Execution, Handle, KeyKind, Outcome, Retention, SessionKey, SessionRequest, Usage
from sandboxes.starter import SessionOver, Starter
from sandboxes.stores.base import AttemptRecord, SessionFilter, SessionRecord, SharedStore, Store

T = TypeVar("T")

USAGE_S = 2.0
USAGES_AT_ONCE = 16


class SessionManager:
    """Everything that a host does with sandboxes. Opened and closed once, by who made it."""

    def __init__(
        self,
        *,
        backend: Backend,
        store: Store,
        owner: Owner,
        settings: ManagerSettings,
        clock: Clock | None = None,
        observer: Observer | None = None,
    ) -> None:
        clock = clock or SystemClock()
        observer = observer or NullObserver()
        self._settings = settings
        self._backend = backend
        self._store = store
        self._clock = clock
        self._engine = Engine(
            backend,
            observer,
            launch_s=settings.launch_s,
            destroy_s=settings.destroy_s,
            engine_s=settings.engine_s,
        )
        self._admission = Admission(
            total=settings.max_sessions,
            per_principal=settings.max_sessions_per_principal,
            max_waiting=settings.max_waiting,
            queue_s=settings.queue_s,
            clock=clock,
            on_pressure=self._make_room,
        )
        self._replica: Replica | None = None
        if backend.shared and isinstance(store, SharedStore):  # else this host has the backend for itself
            rested_s = min(settings.idle_s, settings.evict_after_s, settings.evict_retained_after_s) / 4
            self._replica = Replica(store, observer, clock, beat_s=settings.beat_s, rested_s=rested_s)
        self._keeper = Keeper(
            engine=self._engine,
            store=store,
            records=self._replica or Records(store),
            owner=owner,
            settings=settings,
            clock=clock,
            observer=observer,
            admission=self._admission,
        )
        self._pool = Pool(
            self._engine,
            settings.spec,
            settings.pool_size,
            room=lambda: self._admission.free - self._admission.waiting,
            clock=clock,
            observer=observer,
        )
        self._admission.on_release = self._pool.notice
        joining = None if self._replica is None else Joining(self._keeper, self._replica)
        self._starter = Starter(self._keeper, self._pool, joining)
        self._calls = Calls(self._keeper, self._starter)
        census = None
        if self._replica is not None:
            self._replica.on_over = self._keeper.ended_elsewhere
            census = Census(self._keeper, self._pool, self._starter, self._calls, self._replica)
        self._reaper = Reaper(self._keeper, self._pool, self._starter, self._calls, census)
        self._health = Health(self._keeper)
        self._sweeping: asyncio.Task[None] | None = None
        self._stopping = False
        self.adopted = Adopted()

    async def open(self) -> None:
        """Opens the backend and the store, takes up what an earlier process left, starts the pool and the sweeps.

        Raises IsolationUnavailable, EnvironmentMissing, EngineUnavailable, StoreUnavailable; then nothing is open.
        """
        async with contextlib.AsyncExitStack() as stack:
            await self._backend.open()
            stack.push_async_callback(self._backend.close)
            await self._store.open()
            stack.push_async_callback(self._store.close)
            stack.push_async_callback(self._let_go)
            if self._replica is None:
                self.adopted = await adopt(self._keeper, self._calls, self._starter)
            else:  # whatever there is is reached when somebody asks for it: other replicas may live
                await self._replica.join(self._said, lambda: list(self._keeper.sessions.values()))
            stack.pop_all()
        self._pool.start()
        self._sweeping = asyncio.create_task(self._reaper.run(), name="sweeps")

    async def close(self) -> None:
        """Stops: no new calls; running ones end by the ladder, within `shutdown_s`; then the sandboxes that are not
        to be kept go, within as long again; what is left is for the next start. Never raises SandboxError."""
        self._stopping = True
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
        await self._end_calls()
        for session in list(self._keeper.sessions.values()):
            passing = session.retention in (Retention.REQUEST, Retention.CONNECTION)
            if passing or not self._settings.keep_on_shutdown:
                self._keeper.close(session, CloseReason.SHUTDOWN)
            else:
                self._keeper.save_soon(session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.shutdown_s):
                await self._pool.close()
        await asyncio.gather(*(self._set_aside(handle) for handle in self.adopted.quarantined))
        await self._keeper.drain(self._settings.shutdown_s)
        if self._replica is not None:
            await self._replica.part()
        await self._let_go()
        await self._store.close()
        await self._backend.close()

    async def _set_aside(self, handle: Handle) -> None:
        await self._keeper.destroy(Sandbox(self._engine, handle))

    async def _let_go(self) -> None:
        """Closes what this process holds of sessions that go on without it."""
        for session in list(self._keeper.sessions.values()):  # one that is being lost leaves meanwhile
            runs = [run.task for run in session.runs.values() if run.task is not None]
            for task in runs:
                task.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            for resource in list(session.resources.values()):
                await resource.close()
            if session.sandbox is not None:
                session.sandbox.on_lost = None
                await session.sandbox.close()
        await self._keeper.drain(0)

    # --- calls -------------------------------------------------------------------------------------------------------

    def attach(self, request: SessionRequest) -> Attachment:
        """What a client connection holds of a session. Creates nothing, waits for nothing."""
        return Attachment(self, request)

    async def run(self, key: SessionKey, execution: Execution, on_event: OnEvent | None = None) -> Outcome:
        """Runs a call for who has no connection; makes the session. Raises as `Attachment.run` does."""
        return await self._call(Attachment(self, _request(key)), execution, on_event, attach=False)

    async def collect(self, key: SessionKey, attempt_id: str) -> Outcome:
        """The outcome of an attempt; joins it while it runs. Raises AttemptUnknown, AttemptExpired, SessionUnknown."""
        session = await self._keeper.reach(key) or self._keeper.sessions.get(key)
        if session is not None and session.phase not in OVER:
            try:
                outcome = await self._calls.collect(session, attempt_id)
                self._calls.given(session, outcome)
                return outcome
            except SessionOver:
                raise AttemptUnknown("the session closed before this attempt ran", session=str(key)) from None
        if session is not None:
            await session.closed.wait()
        known = await self._store.attempt(key, attempt_id)
        if known is None:
            if await self._store.get(key) is None:
                raise SessionUnknown("no session of this key is known", session=str(key))
            raise AttemptUnknown("no attempt of this id is known in this session", session=str(key))
        return kept(known)

    # --- operators ---------------------------------------------------------------------------------------------------

    async def sessions(self, which: SessionFilter | None = None) -> Sequence[SessionInfo]:
        """Sessions with what is the case now, newest use first. Raises StoreUnavailable where closed ones are asked."""
        which = which or SessionFilter()
        if self._replica is not None:
            return await self._everywhere(which, self._replica)
        live = [session for session in self._keeper.sessions.values() if which.matches(session.info().live)]
        live = sorted(live, key=lambda session: -session.used_at)[: which.limit]  # the engine is asked for these only
        gate = asyncio.Semaphore(USAGES_AT_ONCE)

        async def info(session: Session) -> SessionInfo:
            async with gate:
                return await self._info(session)

        infos = list(await asyncio.gather(*(info(session) for session in live)))
        if which.include_closed:
            listed = {info.record.incarnation for info in infos}  # one may close while it is listed
            records = [record for record in await self._store.list(which) if record.incarnation not in listed]
            closed = [record for record in records if record.closed_at is not None]
            infos += [SessionInfo(record, Phase.CLOSED) for record in closed]
        infos.sort(key=lambda found: -found.record.last_used_at)
        return infos[: which.limit]

    async def session(self, key: SessionKey) -> SessionInfo:
        """One session, or the last closed one of its key. Raises SessionUnknown."""
        session = await self._keeper.reach(key) or self._keeper.sessions.get(key)
        if session is not None:
            return await self._info(session)
        record = await self._store.get(key)
        if record is None:
            raise SessionUnknown("no session of this key is known", session=str(key))
        return SessionInfo(record, Phase(record.phase))

    async def find(self, digest: str) -> Sequence[SessionKey]:
        """The keys whose digest begins with this text: the open ones, or else closed ones. Raises StoreUnavailable."""
        found = [key for key in self._keeper.sessions if key.digest().startswith(digest)]
        if self._replica is not None:
            there = await self._store.list(SessionFilter(limit=self._settings.max_records))
            known = [*found, *(record.key for record in there if record.key.digest().startswith(digest))]
            found = list(dict.fromkeys(known))
        if found:
            return found
        records = await self._store.list(SessionFilter(include_closed=True, limit=self._settings.max_records))
        return list(dict.fromkeys(record.key for record in records if record.key.digest().startswith(digest)))

    async def attempts(self, key: SessionKey, limit: int = 100) -> Sequence[AttemptRecord]:
        """A session's receipts, newest first, with those of calls that have been answered already."""
        await self._keeper.settled()
        return await self._store.attempts(key, limit=limit)

    async def close_session(self, key: SessionKey, reason: CloseReason = CloseReason.OPERATOR) -> bool:
        """Closes a session and waits for it; False when none was open."""
        session = await self._keeper.reach(key) or self._keeper.sessions.get(key)
        if session is None:
            return False
        began = self._keeper.close(session, reason)
        await session.closed.wait()
        return began and session.ends is not False

    async def interrupt(self, key: SessionKey) -> bool:
        """Ends what runs, by the ladder; False when nothing ran. Raises SessionUnknown, and the channel's errors."""
        session = await self._known(key)
        with session.until_closed():
            return await self._calls.interrupt(session)

    async def restart(self, key: SessionKey) -> int:
        """A new interpreter at once; returns its epoch. Raises SessionUnknown and the errors of the channel."""
        session = await self._known(key)
        sandbox = await self._starter.reached(session)
        if sandbox is None:
            return session.record.epoch  # the next call starts a fresh one anyway
        with session.until_closed():
            epoch = await self._restart(session, sandbox)
        session.update(epoch=max(session.record.epoch, epoch))
        self._keeper.save_soon(session)
        return epoch

    @staticmethod
    async def _restart(session: Session, sandbox: Sandbox) -> int:
        client = await sandbox.client()
        reason = "the operator restarted the interpreter; variables are lost, files are kept"
        session.lost_epoch = await client.epoch()
        session.update(lost_reason=reason)
        try:
            return await client.restart()
        except SandboxError:
            if session.record.lost_reason == reason:
                session.update(lost_reason=None)
            raise

    async def mint(self, principal: str, ttl_s: float | None = None) -> SessionKey:
        """A new retained session's key: a bearer secret. It has a record, and no sandbox before its first call."""
        key = SessionKey(principal, KeyKind.RETAINED, secrets.token_urlsafe(24))
        await self._keeper.open(SessionRequest(key, Retention.RETAINED, ttl_s))
        return key

    async def health(self) -> None:
        """Runs code in a sandbox of its own. The result is kept for a moment. Raises SandboxError."""
        await self._health.check()

    def files(self, key: SessionKey) -> SessionFiles:
        """A session's files, through its agent."""
        return SessionFiles(self._keeper, self._starter, _request(key))

    async def resource_parts(self, key: SessionKey, name: str) -> Mapping[str, bytes]:
        """The committed parts of an open session's resource, empty when it has none. Makes and touches nothing.

        Raises SessionUnknown, StoreUnavailable.
        """
        await self._known(key)
        return await self._store.get_parts(key, name)

    @property
    def counts(self) -> dict[str, int]:
        """For gauges: sessions by phase, `pool` (ready), `waiting` (for a sandbox), `held` of `places`."""
        counts: dict[str, int] = {phase.value: 0 for phase in Phase}
        for session in self._keeper.sessions.values():
            counts[session.phase] += 1
        admission = self._admission
        places = {"held": admission.held, "places": admission.total}
        return {**counts, "pool": self._pool.ready, "waiting": admission.waiting, **places}

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _call(
        self, attachment: Attachment, execution: Execution, on_event: OnEvent | None, *, attach: bool = True
    ) -> Outcome:
        cleanups, digest = attachment.cleanups, execution.digest()
        while True:
            session = await self._session_of(attachment, attach)
            run = self._calls.begin(session, execution, digest, on_event)
            attachment.runs.append((session, run))
            try:
                outcome = await self._calls.wait(session, run, digest)
                self._calls.given(session, outcome)
                return outcome
            except NotReached:
                continue
            except SessionOver:
                if attachment.cleanups != cleanups:
                    raise CallRefused("the session was cleaned up while this call waited; it did not run") from None
            except SandboxError as error:
                self._keeper.observer.failed("call", error)
                raise
            finally:
                attachment.runs.remove((session, run))
                session.touch(self._clock.now())

    def _said(self) -> dict[str, object]:
        """What this replica says of itself to the others."""
        sessions = self._keeper.sessions.values()
        running = {s.record.incarnation: s.running.attempt_id for s in sessions if s.running is not None}
        attached = {s.record.incarnation: len(s.attached) for s in sessions if s.attached}
        return {"running": running, "attached": attached, "pool": sorted(self._pool.names)}

    async def _everywhere(self, which: SessionFilter, replica: Replica) -> Sequence[SessionInfo]:
        """Sessions of all replicas. What the others say of theirs is up to a beat old."""
        living = await replica.living()
        records = await self._store.list(dataclasses.replace(which, phases=None, limit=self._settings.max_records))
        infos = [self._info_there(record, living, replica) for record in records]
        infos = [info for info in infos if which.phases is None or info.phase in which.phases]
        gate = asyncio.Semaphore(USAGES_AT_ONCE)

        async def used(info: SessionInfo) -> SessionInfo:
            if info.record.handle is None or info.phase not in LIVE:
                return info
            async with gate:
                usage, title = await self._usage_of(info.record.handle), self._backend.title(info.record.handle)
                return dataclasses.replace(info, usage=usage, sandbox=title)

        return list(await asyncio.gather(*(used(info) for info in infos[: which.limit])))

    def _info_there(
        self, record: SessionRecord, living: Mapping[str, Mapping[str, object]], replica: Replica
    ) -> SessionInfo:
        session = self._keeper.sessions.get(record.key)
        if session is None or session.record.incarnation != record.incarnation or session.phase in OVER:
            info = SessionInfo(record, Phase.CLOSED if record.closed_at is not None else Phase(record.phase))
        else:
            info = session.info()
        running, attached = info.running, info.attached
        for name, said in living.items():
            if name != replica.name:
                running = running or _said_of(said, "running", record.incarnation, str)
                attached += _said_of(said, "attached", record.incarnation, int) or 0
        phase = Phase.RUNNING if running is not None and info.phase in LIVE else info.phase
        return dataclasses.replace(info, running=running, attached=attached, phase=phase)

    async def _session_of(self, attachment: Attachment, attach: bool = True) -> Session:
        if self._stopping:
            raise CallRefused("the tool host is stopping; try again when it is back")
        session = await self._keeper.open(attachment.request)
        if attach:
            session.attached.add(attachment)
            attachment.session = session
        session.touch(self._clock.now())
        return session

    def _detach(self, attachment: Attachment, *, cleaned: bool) -> None:
        """A connection cleaned up or went. What that ends is decided by the session's retention."""
        session, attachment.session = attachment.session, None
        for _, run in attachment.runs:
            if session is not None and run.waiters <= 1:
                self._calls.abandon(session, run, "cancel")
        if session is None or attachment not in session.attached:
            return
        session.attached.discard(attachment)
        now = self._clock.now()
        if not cleaned and session.retention is Retention.REQUEST:
            session.grace_until = max(session.grace_until or 0.0, now + self._settings.grace_s)
        if self._replica is not None and not session.attached:
            self._keeper.spawn(self._replica.settle_hold(session), "store")
        if session.attached or session.retention is Retention.RETAINED:
            return
        if session.retention is Retention.CONNECTION:
            self._keeper.close(session, CloseReason.CLEANUP if cleaned else CloseReason.DISCONNECT)
        elif cleaned and (session.grace_until is None or now >= session.grace_until):
            self._keeper.close(session, CloseReason.CLEANUP)

    async def _known(self, key: SessionKey) -> Session:
        session = await self._keeper.reach(key)
        if session is None:
            raise SessionUnknown("no open session of this key is known", session=str(key))
        return session

    async def _info(self, session: Session) -> SessionInfo:
        usage, handle = await self._usage(session), session.record.handle
        return session.info(usage, None if handle is None else self._backend.title(handle))

    async def _usage(self, session: Session) -> Usage | None:
        if session.sandbox is None or session.phase not in LIVE:
            return None
        return await self._usage_of(session.sandbox.handle)

    async def _usage_of(self, handle: Handle) -> Usage | None:
        try:
            async with asyncio.timeout(USAGE_S):
                return await self._engine.usage(handle)
        except (SandboxError, TimeoutError):
            return None

    async def _end_calls(self) -> None:
        runs: list[asyncio.Task[Outcome]] = []
        for session in list(self._keeper.sessions.values()):
            for run in list(session.runs.values()):
                self._calls.abandon(session, run, "cancel")
                if run.task is not None and not run.task.done():
                    runs.append(run.task)
        if runs:
            await asyncio.wait(runs, timeout=self._settings.shutdown_s)

    def _make_room(self, principal: str) -> None:
        """Somebody waits for a place: closes what is over anyway, or else the one that is missed least."""
        now = self._clock.now()
        sessions = list(self._keeper.sessions.values())
        for session in sessions:
            if session.slot is not None and (reason := due(session, now, self._settings)) is not None:
                self._keeper.close(session, reason)
                return
        principals = {session.key.principal for session in sessions if session.slot is not None} | {principal}
        order = eviction_order(
            sessions,
            principal,
            capped=self._admission.capped(principal),
            now=now,
            settings=self._settings,
            fair_share=self._settings.max_sessions / len(principals),
        )
        if order:
            self._keeper.close(order[0], CloseReason.EVICTED)


class Attachment:
    """A client connection's hold on a session: attached once it has made a call. Made by `SessionManager.attach`."""

    def __init__(self, manager: SessionManager, request: SessionRequest) -> None:
        self.request = request
        self.session: Session | None = None
        self.runs: list[tuple[Session, Run]] = []
        self.cleanups = 0
        self._manager = manager

    @property
    def key(self) -> SessionKey:
        return self.request.key

    async def run(self, execution: Execution, on_event: OnEvent | None = None) -> Outcome:
        """Runs a call. The first one starts the sandbox. What the code did is in the outcome, never raised.

        Cancelling it ends the running code by the ladder; the outcome goes to the ledger all the same.
        Raises CallRefused, NoCapacity, AttemptConflict, AttemptExpired, EngineUnavailable, ChannelLost (the outcome
        can be collected by the attempt id), StoreUnavailable.
        """
        return await self._manager._call(self, execution, on_event)

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        """A file in the sandbox, whole. Raises CallRefused when it is missing or larger."""
        pieces = [piece async for piece in self._manager.files(self.key).get(path, max_bytes)]
        return b"".join(pieces)

    async def resource(self, name: str, factory: ResourceFactory) -> Resource:
        """The session's resource of that name, made on first use, from its stored parts where there are any.

        Counts as a call, and starts no sandbox. Raises CallRefused, StoreUnavailable.
        """
        manager = self._manager
        while True:
            session = await manager._session_of(self)
            async with session.resource_lock:
                if session.phase in OVER:
                    continue
                if manager._replica is not None and not await manager._replica.hold(session):
                    continue
                resource = session.resources.get(name)
                if not await manager._keeper.records.fresh(session, name) and resource is not None:
                    await resource.close()
                    resource = None
                if resource is None:
                    resource = factory(await manager._store.get_parts(self.key, name))
                    session.resources[name] = resource
                    session.update(calls=session.record.calls + 1)
                return resource

    async def save(self, name: str) -> None:
        """Commits what has changed in a resource now, all of it or nothing. Raises StoreUnavailable."""
        session = self.session
        if session is not None and session.phase not in OVER and (resource := session.resources.get(name)) is not None:
            await self._manager._store.put_parts(self.key, name, resource.changes())
            self._manager._keeper.records.saved(session, name)

    async def cleanup(self) -> None:
        """The client's clean-up: idempotent, returns at once; what it ends, ends in the background."""
        self.cleanups += 1
        self._manager._detach(self, cleaned=True)

    async def gone(self) -> None:
        """The connection ended, without a clean-up or after it. Idempotent."""
        self._manager._detach(self, cleaned=False)


def _said_of(said: Mapping[str, object], what: str, incarnation: str, kind: type[T]) -> T | None:
    table = said.get(what)
    value = table.get(incarnation) if isinstance(table, dict) else None
    return value if isinstance(value, kind) else None


def _request(key: SessionKey) -> SessionRequest:
    return SessionRequest(key, Retention.RETAINED if key.kind is KeyKind.RETAINED else Retention.CHOSEN)
