"""Calls: one after the other in each session, each with one outcome, none of them twice.

Above: `manager`. Below: `keeper`, `starter`, `session`.

What makes that true when the host dies at any moment:

- An attempt whose id the caller chose is committed to the ledger before its code runs, so a retry after a restart
  finds it. An id that the host minted is known to nobody who could retry; it is registered with its outcome.
- The agent keeps every result until it is acknowledged, and it is acknowledged only after the ledger has committed.
  So the outcome goes to the caller while the commit is still under way: it can be fetched from the agent again.
- The agent has its own table of attempts, so an `exec` repeated after a broken connection joins the first.
- When the sandbox is lost, its unsettled attempts are settled as lost before another sandbox starts.
- An attempt that is registered, and that the session's own sandbox does not know, has not run. It stays open in the
  ledger: the same id again runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

from sandboxes.client import REPLY_S, Bound
from sandboxes.errors import (
    AttemptConflict,
    AttemptExpired,
    AttemptUnknown,
    CallRefused,
    ChannelLost,
    EngineUnavailable,
    NoCapacity,
    SandboxError,
    SandboxOutOfMemory,
    StateLost,
)
from sandboxes.events import ExecutionEvent, OnEvent, Printed, Queued, Started
from sandboxes.keeper import Keeper
from sandboxes.lifecycle import LIVE, OVER, Phase, Transition
from sandboxes.observer import Observer
from sandboxes.receipts import lost_outcome, never_started_outcome, of_memory
from sandboxes.records import lost_fate
from sandboxes.sandbox import Sandbox
from sandboxes.session import Run, Session
from sandboxes.spec import Cause, CauseKind, Ending, Execution, Outcome, State
from sandboxes.starter import SessionOver, Starter
from sandboxes.stores.base import AttemptRecord

CLOCKS_S = 5.0  # by which the clocks of two machines may differ
COLLECT_TRIES = 20
COLLECT_PAUSE_S = 0.1
CANCEL_PAUSE_S = 0.05
INTERRUPT_S = REPLY_S  # for asking what runs: who interrupts does not wait for as long as a call is tried
_CUT_SHORT = (Ending.KILLED, Ending.INTERRUPTED, Ending.TIMED_OUT)
_NOT_REACHED = "the tool host stopped before this call reached the sandbox; nothing ran: the same attempt id runs it"


class NotReached(Exception):
    """The sandbox does not know an attempt that was taken over: what becomes of it is the ledger's to say. Or it was
    taken back before it ran, and is wanted again."""


class Calls:
    """Performs executions of sessions."""

    def __init__(self, keeper: Keeper, starter: Starter) -> None:
        self._keeper = keeper
        self._starter = starter

    def begin(self, session: Session, execution: Execution, digest: str, on_event: OnEvent | None) -> Run:
        """The run of an execution (`digest` is its own): a new one, or the one of the same attempt that is under way.

        Raises AttemptConflict, CallRefused.
        """
        attempt_id = execution.attempt_id or minted()
        run = session.runs.get(attempt_id)
        if run is None:
            self._check(session, execution)
            run = Run(attempt_id, digest, execution, self._keeper.clock.now())
            if session.astray.get(attempt_id) == "operator":  # not the caller's to take back
                run.cancelled = "operator"
            session.runs[attempt_id] = run
            session.queue.append(run)
            self._task(session, run, self._perform, "call")
        else:
            self._check_digest(session, run, digest)
        if on_event is not None:
            run.listeners.append(_later(on_event))
        return run

    async def wait(self, session: Session, run: Run, digest: str) -> Outcome:
        """Its outcome, for who has arguments of this digest. Cancelling the last one who waits ends what runs, by the
        ladder. Raises SessionOver and NotReached: it is to be begun again; AttemptConflict."""
        if run.cancelled == "cancel":  # who went away is back, or another came: somebody wants it again
            run.cancelled = ""
        if _taken_back(run) and session.phase not in OVER:
            assert run.task is not None
            await asyncio.wait([run.task])
            await asyncio.sleep(0)  # then the session has forgotten it
            raise NotReached
        run.waiters += 1
        try:
            outcome = await self._watch(session, run)
            self._check_digest(session, run, digest)  # of one that was taken over it may not have been known before
            return outcome
        except asyncio.CancelledError:
            if run.waiters == 1:
                self.abandon(session, run, "cancel")
            raise
        finally:
            run.waiters -= 1

    @staticmethod
    def _check_digest(session: Session, run: Run, digest: str) -> None:
        if run.digest and run.digest != digest:
            raise AttemptConflict(
                "this attempt id was used before with other arguments; nothing ran: use a new id",
                session=str(session.key),
                attempt=run.attempt_id,
            )

    async def _watch(self, session: Session, run: Run) -> Outcome:
        task = run.task
        assert task is not None
        if not task.done():
            # As asyncio.shield does, and told by the run itself: one round of the loop less for each call.
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            run.watchers.append(watcher)
            await watcher
        if task.cancelled():
            if session.phase in OVER:
                raise SessionOver
            raise CallRefused("the call was taken back before it ran", attempt=run.attempt_id)
        return task.result()

    def _task(self, session: Session, run: Run, work: Callable[[Session, Run], Awaitable[Outcome]], name: str) -> None:
        async def perform() -> Outcome:
            outcome = await work(session, run)
            run.wake()
            return outcome

        run.task = asyncio.create_task(perform(), name=name)
        run.task.add_done_callback(lambda task: self._ended(session, run, task))

    def abandon(self, session: Session, run: Run, why: str) -> None:
        """Nobody wants it any more: takes it back, or ends it by the ladder; its outcome goes to the ledger."""
        if run.outcome is not None or run.task is None or run.task.done():
            return
        run.cancelled = why
        if not run.registered:
            run.task.cancel()
        elif run.inside is not None:
            self._keeper.spawn(self._cancel(session, run, run.inside), "cancel")

    def _enter(self, session: Session, run: Run, sandbox: Sandbox) -> None:
        """It is sent now. One that was abandoned while it waited for its turn, and may run inside already, ends."""
        run.inside = sandbox
        if run.cancelled:
            self._keeper.spawn(self._cancel(session, run, sandbox), "cancel")

    @staticmethod
    async def _cancel(session: Session, run: Run, sandbox: Sandbox) -> None:
        """Tells the sandbox, for as long as the call itself is tried and nobody wants it again: what runs outlives a
        broken connection."""
        while run.cancelled:
            try:
                await sandbox.cancel(run.attempt_id, run.cancelled)
                return
            except (AttemptUnknown, ChannelLost, EngineUnavailable, StateLost) as error:
                # Its sandbox is being ended, and the code with it; or the call was over first: it has an outcome, or is
                # astray, and who takes it over cancels it.
                if session.phase in OVER or run.inside is not sandbox:
                    return
                if isinstance(error, StateLost):
                    raise
            await asyncio.sleep(CANCEL_PAUSE_S)  # then it was sent again: an unknown one broke with its connection

    async def interrupt(self, session: Session) -> bool:
        """Ends what runs in the sandbox, by the ladder; False when nothing runs. Raises SandboxError where nobody can
        say what runs, after INTERRUPT_S at most.

        The sandbox is asked what that is. It need not be the call that is this host's to wait for: another host may
        have been first, a call's connection may have been lost, and after a restart what had ended is fetched before
        what runs.
        """
        run = session.running
        failed: SandboxError | None = None
        try:
            async with asyncio.timeout(INTERRUPT_S):
                sandbox = await self._starter.reached(session)
                if sandbox is not None and (running := await sandbox.running()) is not None:
                    with contextlib.suppress(AttemptUnknown):  # it has just ended
                        await sandbox.cancel(running, "operator")
                    return True
        except TimeoutError:
            failed = ChannelLost("the sandbox did not say in time what runs; try again")
        except StateLost:
            pass
        except SandboxError as error:
            failed = error
        if run is not None and run is session.running and run.execution is not None:
            # This host sends its code, and does not only fetch what came of it: that is on its way, there or back.
            self.abandon(session, run, "operator")
            return True
        if failed is not None:
            raise failed
        return False

    async def collect(self, session: Session, attempt_id: str) -> Outcome:
        """The outcome of an attempt of an open session. Raises AttemptUnknown, AttemptExpired, ChannelLost."""
        run = session.runs.get(attempt_id)
        if run is not None and run.task is not None:
            with contextlib.suppress(NotReached):
                return await self._watch(session, run) if run.outcome is None else run.outcome
        known = await self._keeper.store.attempt(session.key, attempt_id)
        if known is not None and (known.receipt is not None):
            return kept(known)
        try:
            sandbox = await self._starter.reached(session)
            if sandbox is None:
                raise AttemptUnknown("no attempt of this id is known in this session")
            outcome = await sandbox.attach(attempt_id, self._bound(None))
        except AttemptUnknown:
            if known is None:
                raise
            if (settled := await self._settled_meanwhile(session, known)) is not None:
                return settled
            if sandbox is not None and known.incarnation == session.record.incarnation:
                if self._may_have_run_before(session, known, sandbox):
                    return await self._settled_lost(session, known)
                return never_started_outcome(session.record, known, self._keeper.clock.now(), _NOT_REACHED, cause=None)
            raise AttemptExpired("this attempt's result is no longer kept", attempt=attempt_id) from None
        except StateLost as error:
            lost = await self._lost_with(session, attempt_id, error)
            if lost is None:
                raise
            return lost
        self._note(session, outcome)
        run = Run(attempt_id, outcome.receipt.digest, None, outcome.receipt.queued_at, outcome=outcome)
        await self._keeper.settle([(session, run)])
        return outcome

    async def clear_up(self, session: Session) -> None:
        """What a host that is gone had running or kept in the session's sandbox, or had registered and never sent, gets
        into the ledger. While another host has the session in use, it may be that one's: then later."""
        session.unclear, cleared = False, False
        try:
            cleared = await self._clear_up(session)
        finally:
            session.unclear = session.unclear or not cleared

    async def _clear_up(self, session: Session) -> bool:
        sandbox, keeper = session.sandbox, self._keeper
        if sandbox is None or not sandbox.connected:
            return False
        hello = (await sandbox.client()).hello
        unsettled = {a.attempt_id: a for a in await keeper.store.attempts(session.key, limit=1000, unsettled=True)}
        if not await keeper.records.alone(session):  # asked last: who registers an attempt holds the session before
            return False
        inside = [*hello.kept, *([hello.running] if hello.running is not None else [])]
        for attempt_id in dict.fromkeys([*inside, *unsettled]):
            known = unsettled.get(attempt_id) or await keeper.store.attempt(session.key, attempt_id)
            if attempt_id in session.runs or (known is not None and known.receipt is not None):
                continue
            if known is not None and attempt_id not in inside and self._may_have_run_before(session, known, sandbox):
                await self._settled_lost(session, known)
                continue
            digest, at = (known.digest, known.registered_at) if known else ("", keeper.clock.now())
            self.take_over(session, attempt_id, digest, at)
        return True

    def take_over(
        self, session: Session, attempt_id: str, digest: str, queued_at: float, *, cancelled: str = ""
    ) -> Run:
        """After a restart, or when a connection was lost for good: joins what runs inside, or fetches what was kept, so
        that it gets into the ledger. `cancelled`: as of a run."""
        run = Run(attempt_id, digest, None, queued_at, registered=True, cancelled=cancelled)
        session.runs[attempt_id] = run
        session.queue.append(run)
        self._task(session, run, self._perform_taken_over, "take-over")
        return run

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check(self, session: Session, execution: Execution) -> None:
        if execution.timeout_s is not None and not execution.timeout_s > 0:
            raise CallRefused("the timeout must be a number of seconds above 0")
        if len(execution.attempt_id) > 128 or not execution.attempt_id.isascii():
            raise CallRefused("the attempt id must be at most 128 ASCII characters")
        if len(session.queue) >= self._keeper.settings.max_waiting_calls:
            raise NoCapacity(
                f"at capacity: {len(session.queue)} calls of this session wait already; try again later",
                session=str(session.key),
            )

    def _bound(self, execution: Execution | None) -> Bound:
        settings = self._keeper.settings
        asked = execution.timeout_s if execution is not None else settings.max_timeout_s
        timeout_s = settings.timeout_s if asked is None else min(asked, settings.max_timeout_s)
        return Bound(timeout_s, settings.grace_step_s)

    async def _perform(self, session: Session, run: Run) -> Outcome:
        execution, keeper = run.execution, self._keeper
        assert execution is not None
        async with _Turn(session, run, self._keeper.observer):
            if keeper.records.shared and not await keeper.records.hold(session):
                raise SessionOver
            if execution.attempt_id and session.phase is not Phase.IDLE:  # what is known starts no sandbox
                known = await self._known(session, run)
                if known is not None:
                    return known
            sandbox = await self._starter.ensure(session, lambda n: run.emit(Queued("admission", n)))
            if session.unclear:
                session.unclear = False
                keeper.spawn(self.clear_up(session), "clear-up")
            run.registered = True
            if execution.attempt_id:
                record = keeper.record_of(session, run)
                registered = await keeper.store.register(record)
                run.fresh = registered == record and run.attempt_id not in session.astray  # a clock may stand still
                if (known := self._settled(session, run, registered)) is not None:
                    return known
                if session.phase is Phase.LOST:  # in this moment
                    sandbox = await self._starter.ensure(session, lambda n: run.emit(Queued("admission", n)))
                    if not run.fresh and (known := await self._known(session, run)) is not None:
                        return known
                if not run.fresh and (
                    run.cancelled or session.phase in OVER or self._may_have_run_before(session, registered, sandbox)
                ):
                    joined = await self._joined(session, run, sandbox, registered)
                    if joined is not None:
                        return joined
            if run.cancelled:
                return self._never_started(session, run, "the call was cancelled before its code ran")
            if session.phase in OVER:
                note = f"{session.end_note}; the code did not run, and its variables and files are gone"
                return self._never_started(session, run, note, closed=True)
            return await self._run(session, run, sandbox, execution)

    async def _joined(self, session: Session, run: Run, sandbox: Sandbox, registered: AttemptRecord) -> Outcome | None:
        """The outcome of one that the ledger had already, that may run inside or have run; None: it has not. One that
        may have run in an earlier sandbox is lost with it, unless this very sandbox has it."""
        with self._inside(session, run, sandbox):
            try:
                outcome = await self._fetched(session, run, sandbox)
            except AttemptUnknown:
                if self._may_have_run_before(session, registered, sandbox):
                    return await self._settled_lost(session, registered)
                return await self._settled_meanwhile(session, registered)
        return self._finish_fetched(session, run, outcome)

    def _never_started(self, session: Session, run: Run, note: str, *, closed: bool = False) -> Outcome:
        keeper = self._keeper
        record = keeper.record_of(session, run)
        cause = Cause(CauseKind.SESSION_CLOSED if closed else CauseKind.CANCEL)
        run.outcome = never_started_outcome(session.record, record, keeper.clock.now(), note, cause=cause)
        keeper.settle_soon(session, run)
        return run.outcome

    async def _run(self, session: Session, run: Run, sandbox: Sandbox, execution: Execution) -> Outcome:
        keeper = self._keeper
        if run in session.queue:
            session.queue.remove(run)
        session.running = run
        run.inside = sandbox
        session.change(Transition.CALL)
        cap = execution.max_characters or keeper.settings.max_characters
        heard = _Heard(cap)

        def on_event(event: ExecutionEvent) -> None:
            heard.take(event, keeper.clock.now())
            run.emit(event)

        try:
            outcome = await sandbox.execute(
                run.attempt_id,
                run.digest,
                execution.call,
                self._bound(execution),
                cap=cap,
                queued_at=run.queued_at,
                session=str(session.key),
                on_event=on_event,
            )
            if outcome.receipt.ending is Ending.KILLED:
                outcome = await self._explained(sandbox, outcome)
        except AttemptUnknown:
            # Another host has joined it after a break, and has committed its outcome.
            known = await keeper.store.attempt(session.key, run.attempt_id)
            if known is None or known.outcome is None:
                raise
            outcome = known.outcome
        except StateLost as error:
            await keeper.records.looked(session, error)
            outcome = self._lost(session, run, error, heard)
        except ChannelLost as error:
            if session.phase not in OVER:  # else it is the end of the session that broke the connection
                session.astray[run.attempt_id] = run.cancelled
                raise
            outcome = self._lost(session, run, error, heard)
        finally:
            run.inside = session.running = None
            if session.phase is Phase.RUNNING:
                session.change(Transition.DONE)
        outcome = self._finish(session, run, outcome)
        if outcome.receipt.ending is Ending.LOST and keeper.records.shared:
            outcome = await self._agreed(session, run, outcome)
        if outcome.state_lost_before is not None:  # a host that is killed now is not to tell it again
            with contextlib.suppress(SandboxError):
                await keeper.save(session)
        return outcome

    async def _agreed(self, session: Session, run: Run, outcome: Outcome) -> Outcome:
        """What the ledger has of a call that was lost: a host that took this one for dead may have been first."""
        keeper = self._keeper
        await keeper.settled()
        with contextlib.suppress(SandboxError):
            known = await keeper.store.attempt(session.key, run.attempt_id)
            if known is not None and known.outcome is not None and known.receipt != outcome.receipt:
                run.outcome = known.outcome
        return run.outcome or outcome

    def given(self, session: Session, outcome: Outcome) -> None:
        """Somebody has got an outcome that was fetched after a restart: the loss that it tells is told."""
        told, pending = outcome.state_lost_before, session.record.lost_reason
        current = session.phase in LIVE and outcome.receipt.epoch == session.record.epoch
        if current and pending is not None and told == pending:
            session.update(lost_reason=None)
            self._keeper.save_soon(session)

    def _finish(self, session: Session, run: Run, outcome: Outcome) -> Outcome:
        keeper = self._keeper
        receipt, key = outcome.receipt, str(session.key)
        if receipt.session != key or receipt.digest != run.digest:
            receipt = dataclasses.replace(receipt, session=key, digest=run.digest)
        if session.phase in OVER and receipt.ending in _CUT_SHORT:
            # What ended it and what is left is the closing's to say, whatever the agent did on its way out.
            cause = Cause(CauseKind.SESSION_CLOSED)
            receipt = dataclasses.replace(receipt, ending=Ending.KILLED, state=State.LOST, cause=cause)
            outcome = dataclasses.replace(outcome, notes=(_ended_note(session),))
        if receipt is not outcome.receipt:
            outcome = dataclasses.replace(outcome, receipt=receipt)
        reason = session.record.lost_reason
        if reason is not None and receipt.ending is not Ending.LOST:
            if receipt.epoch > session.lost_epoch:
                outcome = dataclasses.replace(outcome, state_lost_before=reason)
                session.update(lost_reason=None)
            elif receipt.state is State.LOST:  # the loss befell this one, and it says so itself
                session.update(lost_reason=None)
        self._note(session, outcome)
        run.outcome = outcome
        keeper.observer.execution_ended(session.key, receipt)
        keeper.settle_soon(session, run)
        return outcome

    async def _explained(self, sandbox: Sandbox, outcome: Outcome) -> Outcome:
        """Where the agent cannot see the sandbox's control group, only the engine knows why a process was killed."""
        cause = outcome.receipt.cause
        killed = cause is not None and cause.kind is CauseKind.SIGNAL and cause.signal == signal.SIGKILL
        if killed and await sandbox.ran_out_of_memory():
            return of_memory(outcome, self._keeper.settings.spec.limits.memory_bytes)
        return outcome

    def _note(self, session: Session, outcome: Outcome) -> None:
        record = session.record
        session.update(
            epoch=max(record.epoch, outcome.receipt.epoch),
            sequence=max(record.sequence, outcome.receipt.sequence),
            calls=record.calls + 1,
        )
        session.touch(self._keeper.clock.now())

    def _lost(self, session: Session, run: Run, error: SandboxError, heard: _Heard) -> Outcome:
        """The sandbox went while it ran. Loses it, unless the session is being closed, which ended it."""
        keeper = self._keeper
        closing = session.phase in OVER
        if closing:
            note = _ended_note(session)
        else:
            note = f"the sandbox was lost while the code ran: {error.message}; {lost_fate(error)}"
            keeper.lose(session, f"the sandbox is gone: {error.message}", tell=not run.waiters, error=error)
        return lost_outcome(
            session.record,
            keeper.record_of(session, run),
            keeper.clock.now(),
            note=note,
            printed=heard.printed,
            sequence=session.record.sequence + 1 if heard.sequence is None else heard.sequence,
            started_at=heard.started_at,
            cause=self._cause(error, closing),
            ending=Ending.KILLED if closing else Ending.LOST,
        )

    def _cause(self, error: SandboxError, closing: bool) -> Cause:
        if closing:
            return Cause(CauseKind.SESSION_CLOSED)
        if isinstance(error, SandboxOutOfMemory):
            return Cause(CauseKind.OUT_OF_MEMORY, limit=self._keeper.settings.spec.limits.memory_bytes)
        return Cause(CauseKind.SANDBOX_LOST)

    async def _known(self, session: Session, run: Run) -> Outcome | None:
        """What the ledger has of an attempt with an id of the caller's. Raises AttemptConflict, AttemptExpired."""
        if session.disposal is not None:
            await asyncio.shield(session.disposal)
        known = await self._keeper.store.attempt(session.key, run.attempt_id)
        return None if known is None else self._settled(session, run, known)

    def _settled(self, session: Session, run: Run, known: AttemptRecord) -> Outcome | None:
        """Its outcome, if it has one already. Raises AttemptConflict, AttemptExpired."""
        if known.digest != run.digest:
            raise AttemptConflict(
                "this attempt id was used before with other arguments; nothing ran: use a new id",
                session=str(session.key),
                attempt=run.attempt_id,
            )
        if known.receipt is not None:
            return kept(known)
        if known.incarnation != session.record.incarnation:
            raise AttemptExpired("this attempt ran in a session that is closed; its result is not kept")
        return None  # it is unsettled in this very session: `exec` joins it, or runs it if it never arrived

    async def _perform_taken_over(self, session: Session, run: Run) -> Outcome:
        keeper = self._keeper
        async with _Turn(session, run, self._keeper.observer):
            sandbox = session.sandbox
            if sandbox is None or session.phase not in (Phase.IDLE, Phase.RUNNING):
                raise SessionOver
            with self._inside(session, run, sandbox):
                try:
                    outcome = await self._fetched(session, run, sandbox)
                except AttemptUnknown:
                    if await keeper.store.attempt(session.key, run.attempt_id) is not None:
                        raise NotReached from None
                    attempt = keeper.record_of(session, run)  # of an id that the host minted: nobody sends it again
                    now = keeper.clock.now()
                    outcome = never_started_outcome(session.record, attempt, now, _NOT_REACHED, cause=None)
            return self._finish_fetched(session, run, outcome)

    @contextlib.contextmanager
    def _inside(self, session: Session, run: Run, sandbox: Sandbox) -> Iterator[None]:
        """The session runs it, as far as one can tell: it may run in the sandbox, or have run."""
        session.queue.remove(run)
        session.running = run
        if session.phase is Phase.IDLE:
            session.change(Transition.CALL)
        self._enter(session, run, sandbox)
        try:
            yield
        finally:
            run.inside = session.running = None
            if session.phase is Phase.RUNNING:
                session.change(Transition.DONE)

    async def _fetched(self, session: Session, run: Run, sandbox: Sandbox) -> Outcome:
        """What comes of one that may be inside. Raises AttemptUnknown; ChannelLost and EngineUnavailable, and it is
        astray then."""
        try:
            return await sandbox.attach(run.attempt_id, self._bound(None), run.emit)
        except StateLost as error:
            await self._keeper.records.looked(session, error)
            return self._lost(session, run, error, _Heard())
        except (ChannelLost, EngineUnavailable) as error:
            if session.phase not in OVER:
                session.astray[run.attempt_id] = run.cancelled
                raise
            return self._lost(session, run, error, _Heard())

    def _finish_fetched(self, session: Session, run: Run, outcome: Outcome) -> Outcome:
        if not run.digest:
            run.digest = outcome.receipt.digest
        run.queued_at = outcome.receipt.queued_at
        outcome = self._finish(session, run, outcome)
        if outcome.state_lost_before is not None and not run.waiters:  # nobody may ever read it: the next one tells
            session.update(lost_reason=outcome.state_lost_before)
        return outcome

    def _may_have_run_before(self, session: Session, known: AttemptRecord, sandbox: Sandbox) -> bool:
        """Whether an attempt that this sandbox does not know may have run in an earlier one, that was lost while
        another host had the attempt: that host then had no time to say so."""
        shared, earlier = self._keeper.records.shared, session.record.epoch > 1
        return shared and earlier and known.registered_at < sandbox.handle.created_at + CLOCKS_S

    async def _settled_lost(self, session: Session, known: AttemptRecord) -> Outcome:
        keeper = self._keeper
        outcome = lost_outcome(session.record, known, keeper.clock.now())
        await keeper.store.settle(dataclasses.replace(known, outcome=outcome))
        settled = await keeper.store.attempt(session.key, known.attempt_id)
        return outcome if settled is None else kept(settled)

    async def _settled_meanwhile(self, session: Session, known: AttemptRecord) -> Outcome | None:
        """The outcome of an attempt that is registered and not in the sandbox. Where another host has the session in
        use it may be about to send it, or have just committed it."""
        records, store = self._keeper.records, self._keeper.store
        for _ in range(COLLECT_TRIES if records.shared else 0):
            again = await store.attempt(session.key, known.attempt_id)
            if again is not None and again.receipt is not None:
                return kept(again)
            if await records.alone(session):
                return None
            await asyncio.sleep(COLLECT_PAUSE_S)
        return None

    async def _lost_with(self, session: Session, attempt_id: str, error: StateLost) -> Outcome | None:
        """The outcome of an attempt whose sandbox turned out to be gone."""
        keeper = self._keeper
        if not keeper.records.shared:
            return None
        await keeper.records.looked(session, error)
        if session.phase is Phase.IDLE:
            keeper.lose(session, f"the sandbox is gone: {error.message}", error=error)
        if session.disposal is not None:
            await asyncio.shield(session.disposal)
        known = await keeper.store.attempt(session.key, attempt_id)
        return None if known is None or known.receipt is None else kept(known)

    def _ended(self, session: Session, run: Run, task: asyncio.Task[Outcome]) -> None:
        if run in session.queue:  # it was cancelled before it began
            session.queue.remove(run)
        if task.cancelled() or task.exception() is not None or run.outcome is None:
            session.runs.pop(run.attempt_id, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, SandboxError):
            error.session = error.session or str(session.key)
            error.attempt = error.attempt or run.attempt_id
        run.wake()


class _Turn:
    """One at a time, in the order of arrival. Entering raises SessionOver when the session closed meanwhile."""

    __slots__ = ("_observer", "_run", "_session")

    def __init__(self, session: Session, run: Run, observer: Observer) -> None:
        self._session = session
        self._run = run
        self._observer = observer

    async def __aenter__(self) -> None:
        session = self._session
        try:
            if session.turn.locked():
                began = time.perf_counter()
                self._run.emit(Queued("turn", session.queue.index(self._run) + 1))
                await session.turn.acquire()
                self._observer.queued(session.key, "turn", time.perf_counter() - began)
            else:
                await session.turn.acquire()
            if session.phase in OVER:
                session.turn.release()
                raise SessionOver
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_details: object) -> None:
        self._session.turn.release()
        self._leave()

    def _leave(self) -> None:
        if self._run in self._session.queue:
            self._session.queue.remove(self._run)


class _Heard:
    """What was heard of a call while it ran: all that there is of it when its sandbox is lost. A hostile agent fills no
    memory with it."""

    def __init__(self, cap: int = 0) -> None:
        self._room = cap
        self._pieces: list[str] = []
        self.sequence: int | None = None
        self.started_at: float | None = None

    def take(self, event: ExecutionEvent, now: float) -> None:
        if isinstance(event, Started):
            self.sequence, self.started_at = event.sequence, now
        elif isinstance(event, Printed) and self._room:
            piece = event.text[: self._room]
            self._room -= len(piece)
            self._pieces.append(piece)

    @property
    def printed(self) -> str:
        return "".join(self._pieces)


def _taken_back(run: Run) -> bool:
    """Whether it was cancelled before it could run; it may still be about to notice."""
    task = run.task
    return task is not None and (task.cancelled() or (not task.done() and task.cancelling() > 0))


def _ended_note(session: Session) -> str:
    return f"{session.end_note}; the code was ended, and its variables and files are gone"


def minted() -> str:
    """A new attempt id. Those of one session grow: in a ledger sorted by them they lie side by side."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


def kept(known: AttemptRecord) -> Outcome:
    """The outcome of a settled attempt. Raises AttemptExpired when its text was pruned."""
    if known.outcome is None:
        raise AttemptExpired(
            "this attempt ran, and its result is no longer kept; it is not run again", attempt=known.attempt_id
        )
    return known.outcome


def _later(on_event: OnEvent) -> OnEvent:
    """A listener that cannot harm who calls it."""
    loop = asyncio.get_running_loop()

    def later(event: ExecutionEvent) -> None:
        loop.call_soon(on_event, event)

    return later
