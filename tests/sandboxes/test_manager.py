"""What the manager decides: who closes what and when, what is told, what is kept, on a fake backend."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from sandboxes import calls as calls_module
from sandboxes import client as client_module
from sandboxes import sandbox as sandbox_module
from sandboxes.client import _Execution
from sandboxes.errors import (
    AttemptConflict,
    AttemptExpired,
    AttemptUnknown,
    CallRefused,
    ChannelLost,
    EngineUnavailable,
    NoCapacity,
    SandboxError,
    SessionUnknown,
    StoreUnavailable,
)
from sandboxes.events import ExecutionEvent, Printed, Queued
from sandboxes.lifecycle import CloseReason, Phase, Transition
from sandboxes.manager import Attachment, SessionManager
from sandboxes.owner import Owner
from sandboxes.session import Run
from sandboxes.settings import ManagerSettings
from sandboxes.spec import (
    Cause,
    CauseKind,
    Ending,
    Execution,
    KeyKind,
    Outcome,
    PythonCall,
    Retention,
    SessionKey,
    SessionRequest,
    State,
)
from sandboxes.stores.base import AttemptRecord, SessionFilter, SessionRecord
from sandboxes.stores.memory import MemoryStore
from sandboxes.testing.backend_suite import ENDLESS, run, started
from sandboxes.testing.clock import FakeClock
from sandboxes.testing.fake_agent import FakeAgent
from sandboxes.testing.fake_backend import FakeBackend, FakeEngine, FakeSandbox
from sandboxes.testing.host import Recorder, attach, crash, request, text_of, until

OWNER = Owner("feedfacefeedface", b"k" * 32)


class FullStore(MemoryStore):
    """A store whose disk can be full."""

    full = False

    def _check(self) -> None:
        if self.full:
            raise StoreUnavailable("the disk is full")

    async def put(self, record: SessionRecord, *, expected_version: int | None) -> SessionRecord:
        self._check()
        return await super().put(record, expected_version=expected_version)

    async def settle(self, *attempts: AttemptRecord) -> None:
        self._check()
        await super().settle(*attempts)

    async def register(self, attempt: AttemptRecord) -> AttemptRecord:
        self._check()
        return await super().register(attempt)

    async def put_parts(self, key: SessionKey, resource: str, parts: Mapping[str, bytes | None]) -> None:
        self._check()
        await super().put_parts(key, resource, parts)


class World:
    """A manager on a fake backend and a clock that is turned by hand."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.store = FullStore()
        self.clock = FakeClock()
        self.recorder = Recorder()
        self.managers: list[SessionManager] = []

    async def manager(self, **settings: object) -> SessionManager:
        values: dict[str, object] = {"sweep_s": 1.0, "engine_s": 5.0, "shutdown_s": 2.0, **settings}
        manager = SessionManager(
            backend=FakeBackend(OWNER, self.engine),
            store=self.store,
            owner=OWNER,
            settings=ManagerSettings(**values),  # type: ignore[arg-type]  # named settings
            clock=self.clock,
            observer=self.recorder,
        )
        await manager.open()
        self.managers.append(manager)
        return manager

    @property
    def sandboxes(self) -> list[FakeSandbox]:
        return list(self.engine.sandboxes.values())

    async def empty(self) -> None:
        """Turns the clock on until every sandbox has gone."""
        async with asyncio.timeout(20):
            while self.engine.sandboxes:
                await self.clock.advance(1)
                await asyncio.sleep(0.002)

    def reasons(self) -> list[str]:
        return [change.reason for _, change in self.recorder.changes if change.transition is Transition.CLOSE]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.engine.hangs.clear()
    made.engine.fails.clear()
    for manager in made.managers:
        await manager.close()
    for sandbox in made.sandboxes:
        await sandbox.agent.end()


async def turn(world: World, seconds: float) -> None:
    """Turns the clock a second at a time, so that sweeps see every moment."""
    for _ in range(int(seconds)):
        await world.clock.advance(1)
        await asyncio.sleep(0.001)  # what goes through sockets and tasks of its own


async def test_a_call_leaves_nothing_for_the_garbage_collector(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    events: list[object] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            await at.run(Execution(PythonCall("x")), events.append)
        await manager._keeper.settled()
        assert events
        left = [found for found in gc.get_objects() if type(found) in (Run, _Execution)]
        assert len(left) < 5, left  # what the collector has to find costs as much as a tenth of the call
    finally:
        gc.enable()


# --- retention -------------------------------------------------------------------------------------------------------


async def test_a_requests_session_closes_when_its_last_attached_connection_has_cleaned_up(world: World) -> None:
    manager = await world.manager()
    first, second, idle = (attach(manager, "a", Retention.REQUEST) for _ in range(3))
    await run(first, "x = 1")
    await run(second, "x")
    await idle.cleanup()
    await first.cleanup()
    await first.cleanup()
    assert text_of(await run(second, "x")) == "1"
    await second.cleanup()
    await world.empty()
    assert world.reasons() == ["cleanup"]


async def test_a_request_that_goes_without_cleaning_up_has_a_grace_to_come_back(world: World) -> None:
    manager = await world.manager(grace_s=30.0)
    at = attach(manager, "a", Retention.REQUEST)
    await run(at, "x = 1")
    await at.gone()
    await turn(world, 20)
    again = attach(manager, "a", Retention.REQUEST)
    assert text_of(await run(again, "x")) == "1"
    await again.gone()
    await turn(world, 29)
    assert world.reasons() == []
    await turn(world, 2)
    await world.empty()
    assert world.reasons() == ["disconnect"]


async def test_a_chosen_session_outlives_its_connections_but_not_a_clean_up(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a", Retention.CHOSEN)
    await run(at, "x = 1")
    await at.gone()
    await turn(world, 120)
    at = attach(manager, "a", Retention.CHOSEN)
    assert text_of(await run(at, "x")) == "1"
    await at.cleanup()
    await world.empty()


async def test_a_retained_session_only_detaches(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a" * 22, Retention.RETAINED)
    await run(at, "x = 1")
    await at.cleanup()
    await at.gone()
    await turn(world, 60)
    assert text_of(await run(at, "x")) == "1"
    assert world.reasons() == []


async def test_a_connections_session_ends_with_it_at_once(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "c", Retention.CONNECTION)
    await run(at, "x = 1")
    await at.gone()
    await world.empty()
    assert world.reasons() == ["disconnect"]


async def test_the_keys_of_two_principals_and_of_two_kinds_never_meet(world: World) -> None:
    manager = await world.manager()
    await run(manager.attach(request("a", principal="alice")), "x = 'alice'")
    bob = await run(manager.attach(request("a", principal="bob")), "x")
    assert bob.receipt.ending is Ending.RAISED
    retained = await run(manager.attach(request("a", Retention.RETAINED, "alice")), "x")
    assert retained.receipt.ending is Ending.RAISED
    assert len(world.sandboxes) == 3


async def test_idle_time_and_lifetime_end_sessions_also_with_a_connection_open(world: World) -> None:
    manager = await world.manager(idle_s=100.0, lifetime_s=250.0)
    idle, busy = attach(manager, "idle"), attach(manager, "busy")
    await run(idle, "1")
    for _ in range(3):
        await run(busy, "1")
        await turn(world, 90)
    await world.empty()
    assert sorted(world.reasons()) == ["idle", "lifetime"]
    outcome = await run(idle, "1")
    assert "idle for too long" in (outcome.state_lost_before or "")


async def test_a_time_to_live_narrows_a_retained_session_within_the_maximum(world: World) -> None:
    manager = await world.manager(idle_s=100.0, max_idle_s=150.0)
    for ident, ttl_s in (("short", 10.0), ("long", 1e9)):
        key = SessionKey("alice", KeyKind.RETAINED, ident)
        await run(manager.attach(SessionRequest(key, Retention.RETAINED, ttl_s)), "1")
    await turn(world, 15)
    await until(lambda: len(world.sandboxes) == 1)
    assert [info.record.key.id for info in await manager.sessions()] == ["long"]
    await turn(world, 140)
    await world.empty()


# --- calls -----------------------------------------------------------------------------------------------------------


async def test_a_call_during_closing_waits_and_starts_anew(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    world.engine.delays_s["destroy"] = 0.1
    closing = asyncio.create_task(manager.close_session(at.key))
    await asyncio.sleep(0)
    outcome = await run(at, "1 + 1")
    assert text_of(outcome) == "2"
    assert "the operator closed it" in (outcome.state_lost_before or "")
    assert await closing
    assert not await manager.close_session(SessionKey("nobody", KeyKind.REQUEST, "x"))


async def test_a_clean_up_while_code_runs_ends_it_and_does_not_start_anew(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a", Retention.REQUEST)
    running = await started(at, ENDLESS, attempt="endless")
    queued = asyncio.create_task(run(at, "1"))
    await asyncio.sleep(0)
    await at.cleanup()
    cut, refused = await asyncio.gather(running, queued, return_exceptions=True)
    assert isinstance(cut, Outcome)
    assert cut.receipt.state is State.LOST
    assert cut.receipt.cause == Cause(CauseKind.SESSION_CLOSED)
    assert cut.notes == (
        "the session was closed because its client cleaned it up; the code was ended, and its variables and files are"
        " gone",
    )
    assert isinstance(refused, CallRefused)
    await world.empty()
    assert world.engine.calls["launch"] == 1
    assert (await manager.collect(at.key, "endless")).receipt.ending is cut.receipt.ending


async def test_a_waiting_call_that_is_cancelled_never_runs(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    running = await started(at, "import asyncio\nawait asyncio.sleep(0.2)")
    events: list[ExecutionEvent] = []
    waiting = asyncio.create_task(at.run(Execution(PythonCall("y = 1"), attempt_id="w"), events.append))
    await until(lambda: events != [])
    assert events == [Queued("turn", 1)]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await running
    assert (await run(at, "y")).receipt.ending is Ending.RAISED
    with pytest.raises(AttemptUnknown):
        await manager.collect(at.key, "w")


async def test_more_calls_than_a_session_queues_are_refused(world: World) -> None:
    manager = await world.manager(max_waiting_calls=2)
    at = attach(manager, "a")
    running = await started(at, "import asyncio\nawait asyncio.sleep(0.1)")
    waiting = [asyncio.create_task(run(at, "1")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(NoCapacity, match="2 calls of this session wait"):
        await run(at, "1")
    await asyncio.gather(running, *waiting)


async def test_bad_arguments_create_nothing(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    for execution in (
        Execution(PythonCall("1"), timeout_s=0),
        Execution(PythonCall("1"), timeout_s=float("nan")),
        Execution(PythonCall("1"), attempt_id="x" * 129),
        Execution(PythonCall("1"), attempt_id="\ud800"),
    ):
        with pytest.raises(CallRefused):
            await at.run(execution)
    assert world.sandboxes == []


async def test_a_pruned_outcome_is_expired_and_does_not_run_again(world: World) -> None:
    manager = await world.manager(outcomes_kept_s=10.0)
    at = attach(manager, "a")
    await run(at, "n = 1", attempt="one")
    await manager._keeper.settled()
    await world.store.prune(closed_before=0, outcomes_before=1e12)
    for again in (run(at, "n = 1", attempt="one"), manager.collect(at.key, "one")):
        with pytest.raises(AttemptExpired):
            await again
    assert len(world.sandboxes[0].agent.executed) == 1


async def test_an_attempt_of_a_closed_session_is_not_run_in_the_next(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    first = await run(at, "'once'", attempt="one")
    await manager.close_session(at.key)
    assert await run(at, "'once'", attempt="one") == first
    assert (await manager.collect(at.key, "one")).value == "'once'"
    assert world.sandboxes == []


async def test_collecting_from_unknown_sessions_says_so(world: World) -> None:
    manager = await world.manager()
    key = request("nobody").key
    for ask in (manager.collect(key, "a"), manager.session(key), manager.interrupt(key), manager.restart(key)):
        with pytest.raises(SessionUnknown):
            await ask
    with pytest.raises(SessionUnknown):
        await manager.files(key).list()
    await run(attach(manager, "known"), "1")
    with pytest.raises(AttemptUnknown):
        await manager.collect(request("known").key, "a")


# --- what breaks -----------------------------------------------------------------------------------------------------


async def test_a_broken_connection_is_made_again_and_nothing_runs_twice(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "n = 0")
    call = await started(at, "import asyncio\nn += 1\nawait asyncio.sleep(0.1)\nn")
    world.sandboxes[0].agent.drop_connections()
    assert text_of(await call) == "1"
    world.sandboxes[0].agent.drop_connections()
    assert text_of(await run(at, "n")) == "1"
    agent = world.sandboxes[0].agent
    assert len(agent.executed) == len(set(agent.executed)) == 3


async def test_a_loss_that_a_session_without_a_call_was_to_tell_is_told_by_the_next(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    first = await run(at, "x = 1", attempt="one")
    await at.cleanup()
    assert (await run(attach(manager, "a"), "x = 1", attempt="one")).receipt == first.receipt  # it ran nothing
    await manager.close_session(at.key)
    outcome = await run(attach(manager, "a"), "'x' in globals()")
    assert text_of(outcome) == "False"
    assert "its client cleaned it up; its variables and files are gone" in (outcome.state_lost_before or "")
    assert (await run(attach(manager, "a"), "1")).state_lost_before is None


@contextlib.contextmanager
def stalled(agent: FakeAgent) -> Iterator[None]:
    """It answers nothing, and a call gives it up soon. Before and after, answers may take what a busy machine takes."""
    with pytest.MonkeyPatch.context() as brief:
        brief.setattr(client_module, "REPLY_S", 0.1)
        agent.slow_s = 3600.0
        yield
    agent.slow_s = 0.0


async def test_a_stalled_agent_is_a_bounded_wait_and_its_result_can_be_fetched_again(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    with stalled(world.sandboxes[0].agent), pytest.raises(ChannelLost, match="can be fetched again") as lost:
        await run(at, "'done'", attempt="slow")
    assert lost.value.attempt == "slow"
    assert text_of(await manager.collect(at.key, "slow")) == "'done'"
    assert text_of(await run(at, "x")) == "1"


async def test_a_call_that_runs_is_not_said_not_to_have_run_when_the_engine_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "ENGINE_BACKOFF_S", 0.02)
    manager = await world.manager()
    at = attach(manager, "a")
    call = await started(at, "import asyncio\nawait asyncio.sleep(0.2)\nx = 1", attempt="cut")
    for operation in ("connect", "poll"):
        world.engine.fails[operation] = EngineUnavailable("the engine does not answer")
    world.sandboxes[0].agent.drop_connections()
    with pytest.raises(ChannelLost, match="does not answer"):
        await call
    with pytest.raises(EngineUnavailable):
        await run(at, "1")  # of this one nothing was sent
    world.engine.fails.clear()
    assert (await run(at, "import asyncio\nawait asyncio.sleep(0.2)\nx = 1", attempt="cut")).receipt.ending is Ending.OK
    assert text_of(await run(at, "x")) == "1"
    assert world.sandboxes[0].agent.executed.count("cut") == 1


async def test_a_lying_agent_loses_its_session_and_harms_nobody(world: World) -> None:
    manager = await world.manager()
    at, other = attach(manager, "a"), attach(manager, "b")
    await run(at, "x = 1")
    await run(other, "x = 2")
    liar = next(s for s in world.sandboxes if s.handle == (manager._keeper.sessions[at.key].record.handle))
    liar.agent.lies = [b'{"t":"result","id":%ID%,"receipt":{}}\n']
    outcome = await run(at, "x")
    assert outcome.receipt.ending is Ending.LOST
    assert "broke the protocol" in outcome.notes[0]
    assert text_of(await run(other, "x")) == "2"
    after = await run(at, "x")
    assert (after.receipt.ending, after.receipt.epoch) == (Ending.RAISED, 2)
    assert liar not in world.sandboxes


async def test_a_sandbox_that_dies_between_calls_is_told_with_the_next_outcome(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    world.sandboxes[0].agent.die("exit code 137")
    await until(lambda: manager.counts[Phase.LOST] == 1)
    outcome = await run(at, "1")
    assert "exit code 137" in (outcome.state_lost_before or "")
    assert outcome.receipt.epoch == 2


async def test_a_sandbox_that_dies_at_the_call_is_a_lost_outcome(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    world.sandboxes[0].agent.dies_on = "exec"
    outcome = await run(at, "x", attempt="d")
    assert outcome.receipt.ending is Ending.LOST
    assert "variables are lost, files are kept" in outcome.notes[0]
    assert (await run(at, "x", attempt="d")).receipt == outcome.receipt


async def test_what_a_call_had_printed_is_in_its_outcome_when_its_sandbox_dies(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    printed: list[str] = []
    task = asyncio.create_task(
        at.run(
            Execution(PythonCall("print('begun')\nprint('y' * 50)\nimport time\ntime.sleep(1000)"), max_characters=20),
            on_event=lambda event: printed.append(event.text) if isinstance(event, Printed) else None,
        )
    )
    await until(lambda: "begun" in "".join(printed))
    world.sandboxes[0].agent.die("exit code 137")
    outcome = await task
    assert outcome.receipt.ending is Ending.LOST
    assert outcome.output.head.startswith("begun\nyyy")
    assert outcome.receipt.bytes_out == len(outcome.output.head) <= 20


async def test_one_hung_launch_delays_nobody_else_and_ends(world: World) -> None:
    manager = await world.manager(launch_s=0.2)
    at = attach(manager, "warm")
    await run(at, "x = 1")
    world.engine.hangs.add("launch")
    hung = asyncio.create_task(run(attach(manager, "cold"), "1"))
    assert text_of(await run(at, "x")) == "1"
    with pytest.raises(EngineUnavailable, match="launch"):
        await hung
    world.engine.hangs.clear()
    assert text_of(await run(attach(manager, "cold"), "1 + 1")) == "2"
    assert manager._admission.held == 2


async def test_an_engine_that_cannot_destroy_holds_no_key_and_is_asked_again(world: World) -> None:
    manager = await world.manager(orphan_sweep_s=5.0)
    at = attach(manager, "a")
    await run(at, "x = 1")
    world.engine.fails["destroy"] = EngineUnavailable("down")
    assert await manager.close_session(at.key)
    assert len(world.sandboxes) == 1
    world.engine.fails.clear()
    await turn(world, 6)
    await world.empty()


async def test_a_full_disk_stops_no_running_session_and_loses_no_receipt(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    world.store.full = True
    assert text_of(await run(at, "x")) == "1"
    with pytest.raises(StoreUnavailable):
        await run(attach(manager, "new"), "1")
    with pytest.raises(StoreUnavailable):
        await run(at, "x", attempt="promised")
    with pytest.raises(StoreUnavailable):
        await manager.health()
    world.store.full = False
    await turn(world, 2)
    await manager._keeper.settled()
    assert len(await manager.attempts(at.key)) == 2
    assert text_of(await run(at, "x", attempt="promised")) == "1"
    assert text_of(await run(attach(manager, "new"), "1 + 1")) == "2"


async def test_a_session_closed_while_the_disk_was_full_is_closed_in_the_ledger_later(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    world.store.full = True
    await manager.close_session(at.key)
    world.store.full = False
    outcome = await run(at, "1")
    assert outcome.state_lost_before is not None
    await turn(world, 2)
    closed = await manager.sessions(SessionFilter(include_closed=True))
    assert sorted(info.phase for info in closed) == [Phase.CLOSED, Phase.IDLE]


async def test_a_listener_that_raises_harms_nobody(world: World) -> None:
    manager = await world.manager()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    def bad(event: ExecutionEvent) -> None:
        raise RuntimeError("a listener's fault")

    assert text_of(await attach(manager, "a").run(Execution(PythonCall("1 + 1")), bad)) == "2"
    await until(lambda: complaints != [])
    asyncio.get_running_loop().set_exception_handler(None)


# --- capacity --------------------------------------------------------------------------------------------------------


async def test_queue_time_is_not_charged_to_the_code_and_the_last_is_sent_away(world: World) -> None:
    manager = await world.manager(max_sessions=1, queue_s=20.0, evict_after_s=1e9)
    first = attach(manager, "first")
    await run(first, "1")
    events: list[ExecutionEvent] = []
    second = attach(manager, "second")
    waiting = asyncio.create_task(second.run(Execution(PythonCall("1 + 1"), timeout_s=0.5), events.append))
    await until(lambda: events != [])
    assert events == [Queued("admission", 1)]
    await turn(world, 15)
    await manager.close_session(first.key)
    outcome = await waiting
    assert outcome.receipt.ending is Ending.OK
    third = asyncio.create_task(run(attach(manager, "third"), "1"))
    await until(lambda: manager.counts["waiting"] == 1)
    await turn(world, 21)
    with pytest.raises(NoCapacity, match=r"at capacity: "):
        await third


async def test_eviction_takes_ones_own_idle_request_first_and_never_anothers_retained(world: World) -> None:
    manager = await world.manager(max_sessions=4, evict_after_s=10.0, evict_retained_after_s=15.0)
    held = {
        "retained": manager.attach(request("retained", Retention.RETAINED, "alice")),
        "chosen": manager.attach(request("chosen", Retention.CHOSEN, "alice")),
        "request": manager.attach(request("request", Retention.REQUEST, "alice")),
        "bob": manager.attach(request("bob", Retention.RETAINED, "bob")),
    }
    for at in held.values():
        await run(at, "1")
    await turn(world, 20)
    for _ in range(3):
        await run(manager.attach(request(f"new-{_}", Retention.REQUEST, "alice")), "1")
    evicted = [str(key.id) for key, change in world.recorder.changes if change.transition is Transition.CLOSE]
    assert evicted == ["request", "chosen", "retained"]
    assert set(world.reasons()) == {CloseReason.EVICTED}


async def test_the_pool_gives_way_and_never_exceeds_the_cap(world: World) -> None:
    manager = await world.manager(max_sessions=3, pool_size=2)
    await until(lambda: manager.counts["pool"] == 2)
    for number in range(3):
        await run(attach(manager, f"s{number}"), "1")
    assert world.engine.most <= 3
    assert manager.counts["pool"] == 0
    await manager.close_session(request("s0").key)
    await until(lambda: manager.counts["pool"] == 1)
    assert world.engine.most <= 3
    assert world.recorder.starts == ["pool"] * 3 or "launch" in world.recorder.starts


async def test_a_session_that_needs_its_own_workspace_displaces_a_pooled_sandbox(world: World) -> None:
    manager = await world.manager(max_sessions=2, pool_size=1)
    await until(lambda: manager.counts["pool"] == 1)
    at, other = attach(manager, "a"), attach(manager, "b")
    await run(at, "f = open('/mnt/data/t', 'w')\nf.write('kept')\nf.close()")
    session = manager._keeper.sessions[at.key]
    assert session.record.handle is not None
    world.engine.sandboxes[session.record.handle.sandbox_id].agent.die()
    await until(lambda: manager.counts[Phase.LOST] == 1)
    await run(other, "1")
    assert text_of(await run(at, "open('/mnt/data/t').read()")) == "'kept'"
    assert world.engine.most <= 3  # the dead one is still listed while another is launched


# --- resources -------------------------------------------------------------------------------------------------------


class Notes:
    """A resource for tests."""

    def __init__(self, parts: Mapping[str, bytes]) -> None:
        self.content = parts.get("", b"")
        self.closed = False

    def changes(self) -> Mapping[str, bytes | None]:
        return {"": self.content}

    async def close(self) -> None:
        self.closed = True


async def notes_of(at: Attachment) -> Notes:
    made = await at.resource("notes", Notes)
    assert isinstance(made, Notes)
    return made


async def test_a_resource_is_shared_stored_and_closed_with_its_session(world: World) -> None:
    manager = await world.manager()
    first, second = attach(manager, "a", Retention.REQUEST), attach(manager, "a", Retention.REQUEST)
    notes = await notes_of(first)
    assert await notes_of(second) is notes
    notes.content = b"written"
    await first.save("notes")
    assert await manager.resource_parts(first.key, "notes") == {"": b"written"}
    assert await manager.resource_parts(first.key, "other") == {}
    assert world.sandboxes == []
    await first.cleanup()
    assert not notes.closed
    await crash(manager)
    world.managers.remove(manager)
    manager = await world.manager()
    again = attach(manager, "a", Retention.REQUEST)
    restored = await notes_of(again)
    assert restored.content == b"written"
    await manager.close_session(again.key)
    assert restored.closed
    assert await world.store.get_parts(again.key, "notes") == {}
    with pytest.raises(SessionUnknown):
        await manager.resource_parts(again.key, "notes")


async def test_a_restart_by_the_operator_is_told_once_by_the_call_that_it_ended_or_else_by_the_next(
    world: World,
) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    assert await manager.restart(at.key) == 2
    told = await run(at, "x")
    assert "operator restarted" in (told.state_lost_before or "")
    assert (await run(at, "x = 1")).state_lost_before is None

    call = await started(at, ENDLESS)
    assert await manager.restart(at.key) == 3
    ended = await call
    assert (ended.receipt.state, ended.receipt.epoch, ended.state_lost_before) == (State.LOST, 2, None)
    after = await run(at, "x")
    assert (after.receipt.ending, after.state_lost_before) == (Ending.RAISED, None), "it was told already"


async def test_work_that_a_closing_cuts_off_says_that_the_session_was_closed(world: World) -> None:
    manager = await world.manager()
    for number, work in enumerate((manager.restart, lambda key: manager.files(key).list())):
        at = attach(manager, f"s{number}")
        await run(at, "x = 1")
        (sandbox,) = world.sandboxes
        sandbox.agent.mute = True
        cut = asyncio.create_task(work(at.key))  # type: ignore[arg-type]  # a coroutine each
        await asyncio.sleep(0.01)
        assert await manager.close_session(at.key)
        with pytest.raises(SessionUnknown, match="closed meanwhile"):
            await cut
        await world.empty()


# --- restarts --------------------------------------------------------------------------------------------------------


async def test_two_claimants_of_one_session_are_both_quarantined(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    session = manager._keeper.sessions[at.key]
    double = await FakeBackend(OWNER, world.engine).launch("k-double", ManagerSettings().spec, "w-double")
    channel = await FakeBackend(OWNER, world.engine).connect(double)
    client = await client_module.AgentClient.connect(channel)
    await client.claim(OWNER.ticket(double.sandbox_id, session.claim), session.claim, 7, 7)
    await client.close()
    await crash(manager)
    world.managers.remove(manager)
    manager = await world.manager()
    assert len(manager.adopted.quarantined) == 2
    outcome = await run(attach(manager, "a"), "x")
    assert outcome.receipt.ending is Ending.RAISED
    assert outcome.state_lost_before is not None
    assert len(world.sandboxes) == 3
    await manager.close()
    world.managers.remove(manager)
    assert len(world.sandboxes) == 1


async def test_a_forged_ticket_is_nobodys(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    claim = manager._keeper.sessions[at.key].claim
    forged = await FakeBackend(OWNER, world.engine).launch("k-forged", ManagerSettings().spec, "w-forged")
    client = await client_module.AgentClient.connect(await FakeBackend(OWNER, world.engine).connect(forged))
    await client.claim("0" * 64, claim, 1, 0)
    await client.close()
    await crash(manager)
    world.managers.remove(manager)
    manager = await world.manager()
    assert (manager.adopted.sessions, manager.adopted.removed) == (1, 1)
    assert text_of(await run(attach(manager, "a"), "x")) == "1"


async def test_sandboxes_that_did_not_outlive_the_host_are_told_and_their_attempts_settled(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    call = await started(at, ENDLESS, attempt="running")
    await crash(manager)
    world.managers.remove(manager)
    await asyncio.gather(call, return_exceptions=True)
    for sandbox in world.sandboxes:
        await sandbox.agent.end()
    world.engine.sandboxes.clear()
    manager = await world.manager()
    assert (manager.adopted.sessions, manager.adopted.lost) == (0, 1)
    assert (await manager.collect(at.key, "running")).receipt.ending is Ending.LOST
    outcome = await run(attach(manager, "a"), "x")
    assert "did not outlive" in (outcome.state_lost_before or "")
    assert (outcome.receipt.epoch, outcome.receipt.ending) == (2, Ending.RAISED)


async def restarted(world: World, manager: SessionManager) -> SessionManager:
    """Another process after `kill -9` of the first."""
    await crash(manager)
    world.managers.remove(manager)
    return await world.manager()


async def registered(world: World, manager: SessionManager, at: Attachment, code: str, attempt: str) -> None:
    """The ledger has an attempt, and the host got no further."""
    incarnation = manager._keeper.sessions[at.key].record.incarnation
    digest = Execution(PythonCall(code), attempt_id=attempt).digest()
    await world.store.register(AttemptRecord(at.key, incarnation, attempt, digest, world.clock.now()))


async def losing(world: World, manager: SessionManager, at: Attachment) -> None:
    """The session's sandbox dies between calls: the next outcome tells."""
    await run(at, "x = 1")
    world.sandboxes[0].agent.die()
    await until(lambda: manager.counts[Phase.LOST] == 1)


@pytest.mark.parametrize("sent_again", [True, False])
async def test_a_loss_that_a_call_was_to_tell_while_the_host_was_killed_is_told_once_to_who_comes(
    world: World, sent_again: bool
) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await losing(world, manager, at)
    code = "import asyncio\nawait asyncio.sleep(0.1)\nn = 1"
    call = await started(at, code, attempt="first")
    await crash(manager)
    world.managers.remove(manager)
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: all(sandbox.agent._running is None for sandbox in world.sandboxes))  # it ends meanwhile
    manager = await world.manager()
    at = attach(manager, "a")
    if sent_again:
        assert "the sandbox is gone" in ((await run(at, code, attempt="first")).state_lost_before or "")
    outcome = await run(at, "n")
    assert text_of(outcome) == "1"
    assert ("the sandbox is gone" in (outcome.state_lost_before or "")) is not sent_again
    assert (await run(at, "n")).state_lost_before is None


async def test_a_loss_that_was_told_is_not_told_again_after_a_kill(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await losing(world, manager, at)
    assert (await run(at, "n = 1")).state_lost_before is not None
    manager = await restarted(world, manager)
    at = attach(manager, "a")
    outcome = await run(at, "n")
    assert (text_of(outcome), outcome.state_lost_before) == ("1", None)


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "later"])
async def test_an_attempt_that_was_registered_and_never_reached_the_sandbox_runs_when_it_is_sent_again(
    world: World, at_once: bool
) -> None:
    """The moment of a kill that `make torture` found: between the ledger's commit and the agent."""
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    await registered(world, manager, at, "x += 1", "early")
    manager = await restarted(world, manager)
    at = attach(manager, "a")
    if not at_once:  # the attempt was looked for in the sandbox
        collected = await manager.collect(at.key, "early")
        assert (collected.receipt.ending, collected.receipt.cause) == (Ending.NEVER_STARTED, None)
        assert "nothing ran" in collected.notes[0]
        with pytest.raises(AttemptConflict):
            await run(at, "x += 2", attempt="early")
    for _ in range(2):
        assert (await run(at, "x += 1", attempt="early")).receipt.ending is Ending.OK
    assert text_of(await run(at, "x")) == "2"
    assert world.sandboxes[0].agent.executed.count("early") == 1


async def test_an_attempt_is_not_run_again_in_another_sandbox_when_its_own_is_found_dead_by_the_retry(
    world: World,
) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    with stalled(world.sandboxes[0].agent), pytest.raises(ChannelLost):
        await run(at, "x += 1", attempt="astray")
    world.sandboxes[0].agent.die()
    outcome = await run(at, "x += 1", attempt="astray")
    assert outcome.receipt.ending is Ending.LOST
    assert all("astray" not in sandbox.agent.executed for sandbox in world.sandboxes)


async def test_while_the_ledger_cannot_be_told_of_a_loss_no_other_sandbox_starts_that_could_run_it_again(
    world: World,
) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    with stalled(world.sandboxes[0].agent), pytest.raises(ChannelLost):
        await run(at, "x += 1", attempt="astray")
    world.store.full = True
    world.sandboxes[0].agent.die()
    for attempt in ("", "astray"):
        with pytest.raises(StoreUnavailable):
            await run(at, "x += 1", attempt=attempt)
    world.store.full = False
    assert (await run(at, "x += 1", attempt="astray")).receipt.ending is Ending.LOST
    outcome = await run(at, "'other'")
    assert (text_of(outcome), outcome.receipt.epoch) == ("'other'", 2)
    assert "files are kept" in (outcome.state_lost_before or "")


async def _left_running(world: World) -> tuple[SessionManager, Attachment]:
    """A new host, that still fetches what had ended ("done") while "endless" runs inside, whose turn comes later."""
    manager = await world.manager()
    await run(attach(manager, "a"), "x = 42", attempt="done")
    call = await started(attach(manager, "a"), ENDLESS, attempt="endless")
    await crash(manager)
    world.managers.clear()
    await asyncio.gather(call, return_exceptions=True)
    world.sandboxes[0].agent.slow_s = 0.05
    again = await world.manager()
    session = again._keeper.sessions[attach(again, "a").key]
    await until(lambda: session.running is not None)
    assert session.running is not None
    assert session.running.attempt_id == "done"
    return again, attach(again, "a")


async def _cut_short(manager: SessionManager, at: Attachment, attempt: str) -> None:
    async with asyncio.timeout(5):
        assert (await manager.collect(at.key, attempt)).receipt.ending is Ending.INTERRUPTED


async def test_an_interrupt_after_a_restart_ends_what_runs_and_not_what_is_only_fetched(world: World) -> None:
    manager, at = await _left_running(world)
    assert await manager.interrupt(at.key)
    await _cut_short(manager, at, "endless")
    assert (await manager.collect(at.key, "done")).receipt.ending is Ending.OK
    assert not await manager.interrupt(at.key)
    assert text_of(await run(at, "x")) == "42"


async def test_a_retry_that_is_cancelled_before_what_it_joined_has_its_turn_ends_it(world: World) -> None:
    manager, at = await _left_running(world)
    retry = asyncio.create_task(run(at, ENDLESS, attempt="endless"))
    await until(lambda: bool(at.session and at.session.runs["endless"].waiters))
    assert at.session is not None
    assert at.session.running is not at.session.runs["endless"]
    retry.cancel()
    await asyncio.gather(retry, return_exceptions=True)
    await _cut_short(manager, at, "endless")


async def test_a_caller_who_is_back_before_what_it_joined_has_its_turn_is_not_ended_by_its_own_going_away(
    world: World,
) -> None:
    manager, at = await _left_running(world)
    retry = asyncio.create_task(run(at, ENDLESS, attempt="endless"))
    await until(lambda: bool(at.session and at.session.runs["endless"].waiters))
    assert at.session is not None
    joined = at.session.runs["endless"]
    retry.cancel()
    await asyncio.gather(retry, return_exceptions=True)
    assert (joined.cancelled, joined.inside) == ("cancel", None)
    again = asyncio.create_task(run(at, ENDLESS, attempt="endless"))
    await until(lambda: bool(joined.waiters))
    await until(lambda: joined.inside is not None)
    done, _ = await asyncio.wait([again], timeout=0.5)
    assert not done
    again.cancel()  # the last one who waits still ends it
    await asyncio.gather(again, return_exceptions=True)
    await _cut_short(manager, at, "endless")


async def test_a_caller_who_is_back_while_its_call_is_being_registered_gets_it_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 41")
    assert at.session is not None
    reached, gate = _slow_register(world, monkeypatch)
    first = asyncio.create_task(run(at, "x + 1", attempt="once"))
    await reached.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    again = asyncio.create_task(run(at, "x + 1", attempt="once"))
    await until(lambda: bool(at.session and at.session.runs["once"].waiters))
    gate.set()
    assert text_of(await again) == "42"


async def test_a_caller_who_is_back_in_the_moment_its_call_is_taken_back_gets_it_run(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    running = await started(at, ENDLESS)
    assert at.session is not None
    first = asyncio.create_task(run(at, "6 * 7", attempt="once"))
    await until(lambda: bool(at.session and "once" in at.session.runs))
    taken_back = at.session.runs["once"]
    manager._calls.abandon(at.session, taken_back, "cancel")
    again = asyncio.create_task(run(at, "6 * 7", attempt="once"))
    first.cancel()
    running.cancel()
    assert text_of(await again) == "42"
    await asyncio.gather(first, running, return_exceptions=True)


def _slow_register(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Set when an attempt is in the ledger; and to be set for the host to hear it."""
    register, reached, gate = world.store.register, asyncio.Event(), asyncio.Event()

    async def slow(attempt: AttemptRecord) -> AttemptRecord:
        known = await register(attempt)
        reached.set()
        await gate.wait()
        return known

    monkeypatch.setattr(world.store, "register", slow)
    return reached, gate


async def _astray(world: World, **settings: object) -> tuple[SessionManager, Attachment]:
    """A host whose call "astray" runs on inside, without its connection and without anybody who waits for it."""
    manager = await world.manager(**settings)
    at = attach(manager, "a")
    call = await started(at, ENDLESS, attempt="astray")
    world.engine.fails["connect"] = ChannelLost("it cannot be reached")
    world.sandboxes[0].agent.drop_connections()
    with pytest.raises(ChannelLost):
        await call
    world.engine.fails.clear()
    return manager, at


async def test_a_retry_that_is_cancelled_while_it_is_registered_ends_what_runs_inside(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, at = await _astray(world)
    reached, gate = _slow_register(world, monkeypatch)
    retry = asyncio.create_task(run(at, ENDLESS, attempt="astray"))
    await reached.wait()
    retry.cancel()
    await asyncio.gather(retry, return_exceptions=True)
    gate.set()
    await _cut_short(manager, at, "astray")
    assert world.sandboxes[0].agent._running is None
    assert world.sandboxes[0].agent.executed.count("astray") == 1


async def test_a_session_that_closes_while_a_retry_is_registered_does_not_say_that_what_runs_inside_did_not_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, at = await _astray(world)
    reached, gate = _slow_register(world, monkeypatch)
    retry = asyncio.create_task(run(at, ENDLESS, attempt="astray"))
    await reached.wait()
    session = at.session
    assert session is not None
    assert manager._keeper.close(session, CloseReason.OPERATOR)
    gate.set()
    receipt = (await retry).receipt
    assert (receipt.ending, receipt.state) == (Ending.KILLED, State.LOST)
    assert receipt.cause is not None
    assert receipt.cause.kind is CauseKind.SESSION_CLOSED
    await session.closed.wait()
    (known,) = await world.store.attempts(session.key)
    assert known.receipt is not None
    assert known.receipt.ending is Ending.KILLED


@pytest.mark.parametrize("back", [False, True])
async def test_a_retry_that_is_cancelled_while_it_is_registered_never_started_where_the_sandbox_does_not_know_it(
    world: World, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 41")
    await registered(world, manager, at, "x + 1", "once")
    await world.clock.advance(0.1)
    reached, gate = _slow_register(world, monkeypatch)
    retry = asyncio.create_task(run(at, "x + 1", attempt="once"))
    await reached.wait()
    retry.cancel()
    await asyncio.gather(retry, return_exceptions=True)
    agent = world.sandboxes[0].agent
    agent.slow_s = 0.05
    gate.set()
    assert at.session is not None
    found = at.session.runs["once"]
    if back:  # while the sandbox is asked
        await until(lambda: found.inside is not None)
        assert text_of(await run(at, "x + 1", attempt="once")) == "42"
    else:
        assert (await manager.collect(at.key, "once")).receipt.ending is Ending.NEVER_STARTED
        assert "once" not in agent.executed


async def test_a_stop_ends_what_was_taken_over_and_has_not_had_its_turn(world: World) -> None:
    manager, at = await _left_running(world)
    await manager.close()
    receipts = {known.attempt_id: known.receipt for known in await world.store.attempts(at.key)}
    assert [(name, receipt and receipt.ending) for name, receipt in sorted(receipts.items())] == [
        ("done", Ending.OK),
        ("endless", Ending.INTERRUPTED),
    ]


async def test_an_interrupt_ends_what_runs_on_after_its_connection_was_lost_for_good(world: World) -> None:
    manager, at = await _astray(world)
    world.engine.fails["connect"] = ChannelLost("it cannot be reached")
    with pytest.raises(ChannelLost):  # whether anything runs is not known
        await manager.interrupt(at.key)
    world.engine.fails.clear()
    assert await manager.interrupt(at.key)
    await _cut_short(manager, at, "astray")


async def test_an_interrupt_waits_no_longer_than_for_a_reply_where_the_sandbox_cannot_be_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "INTERRUPT_S", 0.1)
    manager, at = await _astray(world, engine_s=0.5)
    world.engine.hangs.add("connect")
    world.sandboxes[0].agent.drop_connections()
    session = at.session
    assert session is not None
    await until(lambda: session.sandbox is not None and not session.sandbox.connected)
    async with asyncio.timeout(2):
        with pytest.raises(ChannelLost, match="did not say in time"):
            await manager.interrupt(at.key)
        # Here a call of this host's own is on its way: that one it is to end as soon as it can be reached.
        retry = asyncio.create_task(run(at, ENDLESS, attempt="astray"))
        world.engine.hangs.clear()
        await until(lambda: "astray" in session.runs and session.runs["astray"].inside is not None)
        world.engine.hangs.add("connect")
        world.sandboxes[0].agent.drop_connections()
        await until(lambda: session.sandbox is not None and not session.sandbox.connected)
        assert await manager.interrupt(at.key)
    world.engine.hangs.clear()
    assert (await retry).receipt.ending is Ending.INTERRUPTED


async def test_an_interrupt_ends_what_runs_and_not_the_next_call_that_waits_for_it_inside(world: World) -> None:
    manager, at = await _astray(world)
    following = asyncio.create_task(run(at, "1 + 1", attempt="next"))
    await until(lambda: "next" in world.sandboxes[0].agent._attempts)
    assert await manager.interrupt(at.key)
    assert text_of(await following) == "2"
    await _cut_short(manager, at, "astray")


async def test_a_cancel_that_goes_down_with_its_connection_is_sent_again(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    call = await started(at, ENDLESS, attempt="endless")
    agent = world.sandboxes[0].agent
    agent.mute = True
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: agent.ignored == ["cancel"])
    agent.mute = False
    agent.drop_connections()
    await _cut_short(manager, at, "endless")


async def test_a_cancel_that_was_sent_holds_when_the_host_dies_before_it_is_answered(world: World) -> None:
    manager = await world.manager()
    call = await started(attach(manager, "a"), ENDLESS, attempt="endless")
    world.sandboxes[0].agent.slow_s = 0.05
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await asyncio.sleep(0.01)  # it is sent and taken in
    await crash(manager)
    world.managers.clear()
    again = await world.manager()
    await _cut_short(again, attach(again, "a"), "endless")


async def test_a_cancel_that_comes_before_a_call_which_went_down_with_its_connection_ends_it(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 42")
    agent = world.sandboxes[0].agent
    agent.mute = True
    call = asyncio.create_task(run(at, ENDLESS, attempt="endless"))
    await until(lambda: agent.ignored == ["exec"])
    agent.mute = False
    sandbox = at.session and at.session.sandbox
    assert sandbox is not None
    agent.drop_connections()
    await until(lambda: not sandbox.connected)
    call.cancel()  # it connects at once; the call itself does so a moment later
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: "endless" in agent.executed)
    await _cut_short(manager, at, "endless")
    assert text_of(await run(at, "x")) == "42"


async def test_a_cancel_is_not_forgotten_when_its_call_cannot_be_reached_for_longer(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    call = await started(at, ENDLESS, attempt="astray")
    session = at.session
    assert session is not None
    world.engine.fails["connect"] = ChannelLost("it cannot be reached")
    world.sandboxes[0].agent.drop_connections()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: not session.busy)
    world.engine.fails.clear()
    await turn(world, 2)  # a sweep
    await _cut_short(manager, at, "astray")


async def test_an_interrupt_does_not_say_that_nothing_ran_when_its_call_could_not_be_reached_either(
    world: World,
) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    call = await started(at, ENDLESS, attempt="astray")
    world.engine.fails["connect"] = ChannelLost("it cannot be reached")
    world.sandboxes[0].agent.drop_connections()
    with pytest.raises(ChannelLost):  # both try for as long
        await manager.interrupt(at.key)
    await asyncio.gather(call, return_exceptions=True)
    world.engine.fails.clear()
    assert await manager.interrupt(at.key)


async def test_one_that_cannot_be_fetched_keeps_no_other_from_the_ledger(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "6 * 7", attempt="first")
    await run(at, "6 * 7", attempt="second")
    session = at.session
    assert session is not None
    await manager._keeper.settled()
    attach_to, asked = sandbox_module.Sandbox.attach, list[str]()

    async def lost(self: sandbox_module.Sandbox, attempt: str, *others: Any) -> Outcome:
        asked.append(attempt)
        if attempt == "second":
            raise ChannelLost("it cannot be reached")
        return await attach_to(self, attempt, *others)

    monkeypatch.setattr(sandbox_module.Sandbox, "attach", lost)
    session.astray.update(second="", first="")
    for _ in range(3):
        await turn(world, 1)
        await until(lambda: not session.busy)
    assert asked[:3] == ["second", "first", "second"]


async def test_an_operators_interrupt_holds_for_the_retry_of_a_call_that_could_not_be_reached(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    call = await started(at, ENDLESS, attempt="astray")
    world.engine.fails["connect"] = ChannelLost("it cannot be reached")
    world.sandboxes[0].agent.drop_connections()
    sandbox = at.session and at.session.sandbox
    assert sandbox is not None
    await until(lambda: not sandbox.connected)
    assert await manager.interrupt(at.key)
    with pytest.raises(ChannelLost):
        await call
    await until(lambda: "cancel" not in {task.get_name() for task in manager._keeper._tasks})  # it has given up
    assert "cancel" not in {where for where, _ in world.recorder.failures}  # the call's failure is told, and is enough
    world.engine.fails.clear()
    assert (await run(at, ENDLESS, attempt="astray")).receipt.ending is Ending.INTERRUPTED


async def test_what_runs_is_taken_over_by_a_sweep_when_the_engine_did_not_answer_at_the_start(world: World) -> None:
    manager = await world.manager()
    call = await started(attach(manager, "a"), "import asyncio\nawait asyncio.sleep(0.1)\n7", attempt="endless")
    await crash(manager)
    await asyncio.gather(call, return_exceptions=True)
    world.managers.clear()
    world.engine.fails["connect"] = EngineUnavailable("the engine does not answer")
    again = await world.manager()
    session = again._keeper.sessions[attach(again, "a").key]
    await until(lambda: not session.busy)
    world.engine.fails.clear()
    await turn(world, 2)
    await until(lambda: not session.busy)
    await again._keeper.settled()
    (known,) = await world.store.attempts(session.key)
    assert (known.attempt_id, text_of(known.outcome) if known.outcome else "") == ("endless", "7")


async def test_a_retry_joins_what_is_being_fetched_from_the_sandbox_whatever_the_ledger_knew(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    call = await started(at, "import asyncio\nawait asyncio.sleep(0.2)\n'once'")
    (ident,) = manager._keeper.sessions[at.key].runs  # minted: the ledger has nothing of it
    manager = await restarted(world, manager)
    await asyncio.gather(call, return_exceptions=True)
    at = attach(manager, "a")
    other = asyncio.create_task(run(at, "'other'", attempt=ident))
    assert text_of(await run(at, "import asyncio\nawait asyncio.sleep(0.2)\n'once'", attempt=ident)) == "'once'"
    with pytest.raises(AttemptConflict):
        await other
    assert world.sandboxes[0].agent.executed.count(ident) == 1


async def test_what_ran_in_a_first_sandbox_that_the_ledger_never_heard_of_is_lost_and_not_run_again(
    world: World,
) -> None:
    """The host died between the commit of the attempt and that of the session's record, and the sandbox with it."""
    manager = await world.manager()
    at = attach(manager, "a")
    (await manager._keeper.open(at.request)).touch(world.clock.now())
    await registered(world, manager, at, "x = 1", "first")
    manager = await restarted(world, manager)
    at = attach(manager, "a")
    assert (await run(at, "x = 1", attempt="first")).receipt.ending is Ending.LOST
    assert text_of(await run(at, "1 + 1")) == "2"


async def test_requests_without_a_connection_go_after_the_grace_of_a_restart(world: World) -> None:
    manager = await world.manager()
    for retention in Retention:
        await run(attach(manager, retention.value, retention), "x = 1")
    await crash(manager)
    world.managers.remove(manager)
    manager = await world.manager(grace_s=10.0)
    await until(lambda: len(world.sandboxes) == 3)
    await turn(world, 12)
    await until(lambda: len(world.sandboxes) == 2)
    assert sorted(info.record.key.id for info in await manager.sessions()) == ["chosen", "retained"]


async def test_a_sandbox_without_a_session_is_removed_by_the_sweep(world: World) -> None:
    manager = await world.manager(orphan_sweep_s=5.0, pool_size=1)
    await run(attach(manager, "a"), "1")
    await until(lambda: manager.counts["pool"] == 1)
    await FakeBackend(OWNER, world.engine).launch("k-orphan", ManagerSettings().spec, "w-orphan")
    assert len(world.sandboxes) == 3
    await turn(world, 12)
    await until(lambda: len(world.sandboxes) == 2)


async def test_a_stop_ends_running_calls_and_refuses_new_ones(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    call = await started(at, ENDLESS)
    await manager.close()
    world.managers.remove(manager)
    assert (await call).receipt.ending is Ending.INTERRUPTED
    with pytest.raises(CallRefused, match="stopping"):
        await run(at, "1")
    assert len(world.sandboxes) == 1


async def test_a_start_asks_a_busy_engine_again(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    await run(at, "x = 1")
    await crash(manager)
    world.managers.remove(manager)
    world.engine.fails["list_owned"] = EngineUnavailable("the engine does not answer: timed out")

    def answers() -> None:
        world.engine.fails.clear()

    world.recorder.on_failure = answers
    manager = await world.manager()
    assert manager.adopted.sessions == 1
    assert text_of(await run(attach(manager, "a"), "x")) == "1"


async def test_a_start_that_fails_leaves_nothing_open(world: World) -> None:
    manager = await world.manager()
    await run(attach(manager, "a"), "x = 1")
    await crash(manager)
    world.managers.remove(manager)
    world.engine.fails["list_owned"] = EngineUnavailable("down")
    with pytest.raises(EngineUnavailable):
        await world.manager()
    world.engine.fails.clear()
    manager = await world.manager()
    assert text_of(await run(attach(manager, "a"), "x")) == "1"


# --- operators -------------------------------------------------------------------------------------------------------


async def test_operators_see_what_is_recorded_and_what_is_the_case(world: World) -> None:
    manager = await world.manager()
    at = attach(manager, "a")
    call = await started(at, "import asyncio\nawait asyncio.sleep(0.2)", attempt="now")
    waiting = asyncio.create_task(run(at, "1"))
    await asyncio.sleep(0)
    info = await manager.session(at.key)
    assert (info.phase, info.running, info.waiting, info.attached) == (Phase.RUNNING, "now", 1, 1)
    assert info.usage is not None
    world.engine.hangs.add("usage")
    await asyncio.gather(call, waiting)
    minted = await manager.mint("alice", ttl_s=60)
    assert len(minted.id) >= 22
    assert minted.kind is KeyKind.RETAINED
    listed = await manager.sessions(SessionFilter(principal="alice", phases=frozenset({"new"})))
    assert [info.record.key for info in listed] == [minted]
    assert len(world.sandboxes) == 1
    await manager.close_session(at.key)
    closed = await manager.session(at.key)
    assert (closed.phase, closed.record.close_reason, closed.record.calls) == (Phase.CLOSED, "operator", 2)
    with contextlib.suppress(SandboxError):
        await manager.interrupt(minted)


async def test_health_is_checked_once_for_many_and_again_after_a_while(world: World) -> None:
    manager = await world.manager(health_kept_s=5.0)
    await asyncio.gather(*(manager.health() for _ in range(10)))
    await manager.health()
    assert world.engine.calls["launch"] == 1
    world.engine.fails["launch"] = EngineUnavailable("down")
    await world.clock.advance(6)
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await manager.health()
    assert world.engine.calls["launch"] == 2
    del world.engine.fails["launch"]
    await world.clock.advance(1.1)  # a failure is kept for less
    await manager.health()
    assert world.engine.calls["launch"] == 3
    await world.empty()


async def test_a_check_that_hangs_is_a_failure_of_its_own_and_the_next_is_not_kept_waiting_by_it(world: World) -> None:
    manager = await world.manager(health_s=0.05)
    world.engine.delays_s["launch"] = 3600.0
    with pytest.raises(EngineUnavailable, match=r"did not end in 0\.05 s"):
        await manager.health()
    world.engine.delays_s.clear()
    await world.clock.advance(1.1)
    await manager.health()
    await world.empty()


async def test_two_hundred_clients_of_two_principals_share_twenty_places(world: World) -> None:
    manager = await world.manager(max_sessions=20, max_sessions_per_principal=20, max_waiting=200, evict_after_s=1e9)
    order: list[str] = []

    async def client(principal: str, number: int) -> Ending:
        at = manager.attach(request(f"c{number}", Retention.REQUEST, principal))
        outcome = await at.run(Execution(PythonCall("1 + 1"), timeout_s=5))
        order.append(principal)
        await at.cleanup()
        return outcome.receipt.ending

    clients = [asyncio.create_task(client("greedy", number)) for number in range(160)]
    clients += [asyncio.create_task(client("modest", number)) for number in range(40)]
    assert set(await asyncio.gather(*clients)) == {Ending.OK}
    last_modest = max(index for index, principal in enumerate(order) if principal == "modest")
    assert order[:last_modest].count("greedy") <= 20 + 2 * 40
    assert world.engine.most <= 20
    await world.empty()


async def test_rounds_of_connect_call_and_close_leave_nothing_behind(world: World) -> None:
    manager = await world.manager()

    async def round_of(number: int) -> None:
        at = attach(manager, f"r{number}", Retention.REQUEST)
        assert text_of(await run(at, "1 + 1")) == "2"
        await at.cleanup()
        await world.empty()

    async def held() -> tuple[int, int, int]:
        await manager._keeper.settled()
        await until(lambda: not manager._keeper._tasks)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())

    for number in range(3):
        await round_of(number)
    before = await held()
    for number in range(25):
        await round_of(number)
    after = await held()
    assert all(now <= then + 1 for now, then in zip(after, before, strict=True)), (before, after)
    keeper = manager._keeper
    assert (keeper.sessions, keeper.doomed, keeper.busy_ids, keeper.unsaved) == ({}, {}, set(), [])
    assert manager._admission.held == 0
