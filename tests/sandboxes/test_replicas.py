"""Several hosts over one store and one backend: any of them reaches any session, and one of them ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sandboxes.errors import AttemptUnknown, NoCapacity, SessionUnknown, StoreUnavailable
from sandboxes.lifecycle import Phase, Transition
from sandboxes.manager import SessionManager
from sandboxes.owner import Owner
from sandboxes.receipts import lost_outcome
from sandboxes.settings import ManagerSettings
from sandboxes.spec import CauseKind, Ending, KeyKind, Retention, SessionKey, State
from sandboxes.stores.base import SessionFilter, SharedStore
from sandboxes.stores.memory import MemoryStore
from sandboxes.stores.redis import RedisStore
from sandboxes.testing.backend_suite import ENDLESS, run, started
from sandboxes.testing.fake_backend import FakeBackend, FakeEngine
from sandboxes.testing.host import Recorder, attach, crash, text_of, until
from tests.toolhost.gateway import redis_server as redis_server_module
from tests.toolhost.gateway.redis_server import RedisServer

OWNER = Owner("feedfacefeedface", b"k" * 32)
SLEEP = "import asyncio\nawait asyncio.sleep({})\nx"


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if redis_server_module.PATH is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


class Cluster:
    """A backend of two nodes, a store, and as many hosts as a test asks for."""

    def __init__(self, url: str | None, prefix: str) -> None:
        self.engine = FakeEngine(["n1", "n2"])
        self.memory = MemoryStore()
        self.url, self.prefix = url, prefix
        self.recorder = Recorder()
        self.managers: list[SessionManager] = []

    def store(self) -> SharedStore:
        return self.memory if self.url is None else RedisStore(self.url, self.prefix)

    async def host(self, **settings: object) -> SessionManager:
        values: dict[str, object] = {"sweep_s": 0.02, "shutdown_s": 2.0, "beat_s": 0.05, **settings}
        manager = SessionManager(
            backend=FakeBackend(OWNER, self.engine),
            store=self.store(),
            owner=OWNER,
            settings=ManagerSettings(**values),  # type: ignore[arg-type]  # named settings
            observer=self.recorder,
        )
        await manager.open()
        self.managers.append(manager)
        return manager

    async def kill(self, manager: SessionManager) -> None:
        self.managers.remove(manager)
        await crash(manager)

    async def end(self) -> None:
        for manager in self.managers:
            await manager.close()
        for sandbox in list(self.engine.sandboxes.values()):
            await sandbox.agent.end()

    def closes(self) -> list[str]:
        return [change.reason for _, change in self.recorder.changes if change.transition is Transition.CLOSE]

    @property
    def ran(self) -> list[str]:
        return [ran for found in self.engine.sandboxes.values() for ran in found.agent.executed]


@pytest.fixture(params=["memory", "redis"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    url = request.getfixturevalue("redis_server").url if request.param == "redis" else None
    made = Cluster(url, f"{tmp_path.name}:")
    yield made
    await made.end()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 - what another host writes has no event here
            await asyncio.sleep(0.02)


async def empty(cluster: Cluster) -> None:
    await until(lambda: not cluster.engine.sandboxes)


# --- reaching --------------------------------------------------------------------------------------------------------


async def test_another_host_goes_on_with_the_same_variables_epoch_and_sequence(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    first = await run(attach(a, "k"), "x = 41")
    second = await run(attach(b, "k"), "x += 1")
    third = await run(attach(a, "k"), "x")
    assert text_of(third) == "42"
    assert [o.receipt.epoch for o in (first, second, third)] == [1, 1, 1]
    assert [o.receipt.sequence for o in (first, second, third)] == [1, 2, 3]
    assert [o.state_lost_before for o in (first, second, third)] == [None, None, None]
    assert len(cluster.engine.launched) == 1


@pytest.mark.parametrize("pool", [0, 2])
async def test_twenty_same_keys_at_two_hosts_are_twenty_sandboxes(cluster: Cluster, pool: int) -> None:
    a, b = await cluster.host(pool_size=pool), await cluster.host(pool_size=pool)
    if pool:
        await until(lambda: a.counts["pool"] + b.counts["pool"] == 4)
    code = "n = globals().get('n', 0) + 1\nn"
    calls = [run(attach(manager, f"k{number}"), code) for number in range(20) for manager in (a, b)]
    outcomes = await asyncio.gather(*calls)
    for one, two in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert sorted([text_of(one), text_of(two)]) == ["1", "2"]
        assert {one.receipt.epoch, two.receipt.epoch} == {1}
    claimed = [found for found in cluster.engine.sandboxes.values() if found.agent._claim is not None]
    assert len(claimed) == 20


async def test_calls_at_two_hosts_run_one_after_the_other(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    await run(attach(a, "k"), "log = []")
    code = "import asyncio\nlog.append('in')\nawait asyncio.sleep(0.005)\nlog.append('out')"
    await asyncio.gather(*(run(attach(manager, "k"), code) for _ in range(10) for manager in (a, b)))
    assert text_of(await run(attach(a, "k"), "log == ['in', 'out'] * 20")) == "True"


async def test_a_call_waits_for_the_long_one_of_another_host(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.client.START_S", 0.1)
    monkeypatch.setattr("sandboxes.client.MARGIN_S", 0.5)
    a, b = await cluster.host(grace_step_s=0.01), await cluster.host(grace_step_s=0.01)
    await run(attach(a, "k"), "x = 42")
    long = await started(attach(a, "k"), SLEEP.format(2.5))
    assert text_of(await run(attach(b, "k"), "x", timeout_s=0.5)) == "42"
    assert text_of(await long) == "42"


async def test_of_two_hosts_that_say_of_a_call_that_it_was_lost_the_first_is_believed(cluster: Cluster) -> None:
    host = await cluster.host()
    at = attach(host, "k")
    call = await started(at, SLEEP.format(60), attempt="one")
    record, known = await host._store.get(at.key), await host._store.attempt(at.key, "one")
    assert record is not None
    assert known is not None
    theirs = lost_outcome(record, known, time.time() - 1.0)  # another one took this host for dead
    await host._store.settle(dataclasses.replace(known, outcome=theirs))
    cluster.engine.lose_node(cluster.engine.launched[0].node)
    assert (await call).receipt == theirs.receipt
    assert (await host.collect(at.key, "one")).receipt == theirs.receipt


async def test_a_resource_follows_the_host_that_is_asked(cluster: Cluster) -> None:
    class Pages:
        def __init__(self, parts: object) -> None:
            self.pages = dict(parts)  # type: ignore[call-overload]

        def changes(self) -> dict[str, bytes | None]:
            return dict(self.pages)

        async def close(self) -> None: ...

    a, b = await cluster.host(), await cluster.host()
    at, bt = attach(a, "k"), attach(b, "k")
    for number, here in enumerate((at, bt, at, at)):
        resource = await here.resource("browser", Pages)
        assert isinstance(resource, Pages)
        assert sorted(resource.pages) == [str(n) for n in range(number)]
        resource.pages[str(number)] = b"page"
        await here.save("browser")


# --- a host that dies ------------------------------------------------------------------------------------------------


async def test_what_a_killed_host_ran_is_collected_at_another(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    await run(attach(a, "k"), "x = 42")
    running = await started(attach(a, "k"), SLEEP.format(0.3), attempt="long")
    await cluster.kill(a)
    await asyncio.gather(running, return_exceptions=True)
    began = time.monotonic()
    key = attach(b, "k").key
    assert text_of(await b.collect(key, "long")) == "42"
    assert time.monotonic() - began < 5
    assert text_of(await run(attach(b, "k"), "x")) == "42"
    assert cluster.ran.count("long") == 1
    assert text_of(await run(attach(b, "k"), SLEEP.format(0.3), attempt="long")) == "42"
    assert cluster.ran.count("long") == 1
    with pytest.raises(AttemptUnknown):
        await b.collect(key, "never")
    with pytest.raises(SessionUnknown):
        await b.collect(SessionKey("nobody", KeyKind.REQUEST, "x"), "never")


async def test_a_running_attempt_of_a_living_host_is_joined_at_another(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    await run(attach(a, "k"), "x = 42")
    running = await started(attach(a, "k"), SLEEP.format(0.2), attempt="long")
    collected = await b.collect(attach(b, "k").key, "long")
    outcome = await running
    assert collected.receipt.attempt_id == outcome.receipt.attempt_id
    assert text_of(collected) == text_of(outcome) == "42"
    again = await run(attach(a, "k"), SLEEP.format(0.2), attempt="long")
    assert text_of(again) == "42"
    assert cluster.ran.count("long") == 1


async def test_attempts_of_a_dead_host_get_into_the_ledger_without_being_asked_for(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host(orphan_sweep_s=0.1)
    at = attach(b, "k")
    await run(at, "x = 42")
    running = await started(attach(a, "k"), SLEEP.format(0.2), attempt="long")
    await cluster.kill(a)
    await asyncio.gather(running, return_exceptions=True)

    async def ended() -> bool:
        return any(o.attempt_id == "long" and o.receipt is not None for o in await b.attempts(at.key))

    await eventually(ended)
    (found,) = [o for o in await b.attempts(at.key) if o.attempt_id == "long"]
    assert found.receipt is not None
    assert found.receipt.ending is Ending.OK


async def test_sessions_of_a_dead_host_end_when_they_are_due(cluster: Cluster) -> None:
    a = await cluster.host()
    await run(attach(a, "r", Retention.REQUEST), "1")
    await run(attach(a, "c"), "1")
    await cluster.kill(a)
    b = await cluster.host(orphan_sweep_s=0.1, grace_s=0.3, idle_s=60.0)
    await until(lambda: len(cluster.engine.sandboxes) == 1)
    assert cluster.closes() == ["disconnect"]
    assert text_of(await run(attach(b, "c"), "1")) == "1"


async def test_the_pool_of_a_dead_host_is_swept_and_that_of_a_living_one_is_not(cluster: Cluster) -> None:
    a = await cluster.host(pool_size=2)
    b = await cluster.host(pool_size=1, orphan_sweep_s=0.1, launch_s=0.2)
    await until(lambda: len(cluster.engine.sandboxes) == 3)
    await asyncio.sleep(1)
    assert len(cluster.engine.sandboxes) == 3
    await cluster.kill(a)
    await until(lambda: len(cluster.engine.sandboxes) == 1)
    await asyncio.sleep(0.5)
    assert len(cluster.engine.sandboxes) == 1
    assert b.counts["pool"] == 1


async def test_a_lease_whose_host_died_before_it_was_on_record_is_swept(cluster: Cluster) -> None:
    a = await cluster.host()
    cluster.engine.delays_s["connect"] = 60
    call = asyncio.create_task(run(attach(a, "k"), "1"))
    await until(lambda: len(cluster.engine.sandboxes) == 1)
    await cluster.kill(a)
    await asyncio.gather(call, return_exceptions=True)
    cluster.engine.delays_s.clear()
    b = await cluster.host(orphan_sweep_s=0.1, launch_s=0.2)
    await empty(cluster)
    assert text_of(await run(attach(b, "k"), "1 + 1")) == "2"


async def test_a_host_that_starts_or_stops_leaves_the_others_sessions_alone(cluster: Cluster) -> None:
    a = await cluster.host(orphan_sweep_s=0.1, launch_s=0.2)
    await run(attach(a, "k"), "x = 42")
    request_at = attach(a, "r", Retention.REQUEST)
    await run(request_at, "y = 1")
    b = await cluster.host(orphan_sweep_s=0.1, launch_s=0.2)
    await run(attach(b, "r", Retention.REQUEST), "y")
    await asyncio.sleep(0.5)
    cluster.managers.remove(b)
    await b.close()
    assert text_of(await run(attach(a, "k"), "x")) == "42"
    assert text_of(await run(request_at, "y")) == "1"
    assert len(cluster.engine.launched) == 2


# --- closing ---------------------------------------------------------------------------------------------------------


async def test_a_clean_up_at_one_host_closes_what_another_knows(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    await run(attach(a, "k"), "x = 1")
    await attach(a, "k").gone()
    old = a._keeper.sessions[attach(a, "k").key]
    old.attached.clear()
    at = attach(b, "k")
    await run(at, "x")
    await asyncio.sleep(0.1)  # its hold at the other host has ended
    await at.cleanup()
    await empty(cluster)
    outcome = await run(attach(a, "k"), "1 + 1")
    assert text_of(outcome) == "2"
    assert outcome.state_lost_before == (
        "the earlier session of this id was closed because its client cleaned it up; its variables and files are gone"
    )
    assert outcome.receipt.epoch == 1
    assert len(cluster.engine.launched) == 2


async def test_the_last_of_two_attached_hosts_closes(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    at, bt = attach(a, "k", Retention.REQUEST), attach(b, "k", Retention.REQUEST)
    await run(at, "x = 42")
    await run(bt, "x")
    await at.cleanup()
    await asyncio.sleep(0.2)
    assert text_of(await run(bt, "x")) == "42"
    await bt.cleanup()
    await empty(cluster)
    assert cluster.closes() == ["cleanup"]


async def test_of_hosts_that_clean_up_at_once_exactly_one_closes(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    for number in range(10):
        attached = [attach(manager, f"k{number}", Retention.REQUEST) for manager in (a, b)]
        await asyncio.gather(*(run(at, "1") for at in attached))
        await asyncio.gather(*(at.cleanup() for at in attached))
    await empty(cluster)
    assert len(cluster.engine.launched) == 10

    async def all_closed() -> bool:
        records = await a._store.list(SessionFilter(include_closed=True))
        return [record.phase for record in records] == ["closed"] * 10

    await eventually(all_closed)


async def test_use_at_another_host_keeps_a_session_from_being_idle(cluster: Cluster) -> None:
    a, b = await cluster.host(idle_s=0.6), await cluster.host(idle_s=0.6)
    await run(attach(a, "k"), "x = 42")
    for _ in range(6):
        await asyncio.sleep(0.25)
        assert text_of(await run(attach(b, "k"), "x")) == "42"
    assert cluster.closes() == []
    await empty(cluster)
    await asyncio.sleep(0.1)
    assert set(cluster.closes()) == {"idle"}
    outcome = await run(attach(a, "k"), "1")
    assert "idle for too long" in (outcome.state_lost_before or "")


async def test_a_long_call_at_another_host_keeps_a_session_from_being_idle(cluster: Cluster) -> None:
    a = await cluster.host(idle_s=0.2)
    b = await cluster.host(idle_s=0.2, orphan_sweep_s=0.05)
    await run(attach(b, "k"), "x = 42")
    running = await started(attach(a, "k"), SLEEP.format(1.0))
    assert text_of(await running) == "42"
    assert len(cluster.engine.launched) == 1


async def test_an_operator_closes_at_any_host_what_runs_at_another(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    running = await started(attach(a, "k"), ENDLESS, attempt="endless")
    assert await b.close_session(attach(b, "k").key)
    outcome = await running
    assert outcome.receipt.state is State.LOST
    assert outcome.receipt.cause is not None
    assert outcome.receipt.cause.kind is CauseKind.SESSION_CLOSED
    assert "the operator closed it" in outcome.notes[0]
    await empty(cluster)
    await until(lambda: not a._keeper.sessions)
    assert not await a.close_session(attach(a, "k").key)


async def test_two_hosts_that_close_at_once_end_it_once(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    await run(attach(a, "k"), "1")
    await run(attach(b, "k"), "1")
    key = attach(a, "k").key
    assert sorted(await asyncio.gather(a.close_session(key), b.close_session(key))) == [False, True]
    await empty(cluster)


async def test_a_closing_whose_host_died_over_it_is_finished(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.keeper.CLOSING_S", 0.2)
    a, b = await cluster.host(), await cluster.host()
    await run(attach(a, "k"), "x = 1")
    cluster.engine.hangs.add("destroy")
    closing = asyncio.create_task(a.close_session(attach(a, "k").key))
    await until(lambda: cluster.engine.calls["destroy"] > 0)
    await cluster.kill(a)
    closing.cancel()
    cluster.engine.hangs.clear()
    outcome = await run(attach(b, "k"), "1 + 1")
    assert text_of(outcome) == "2"
    assert "the operator closed it" in (outcome.state_lost_before or "")
    assert len(cluster.engine.sandboxes) == 1


async def test_operators_see_and_interrupt_the_sessions_of_all_hosts(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    at = attach(a, "k")
    await run(at, "x = 42")
    running = await started(at, ENDLESS, attempt="endless")
    await run(attach(b, "other"), "1")
    await asyncio.sleep(0.2)  # a beat
    infos = {info.record.key.id: info for info in await b.sessions()}
    assert sorted(infos) == ["k", "other"]
    assert (infos["k"].phase, infos["k"].running, infos["k"].attached) == (Phase.RUNNING, "endless", 1)
    assert infos["k"].usage is not None
    assert {info.record.handle.node for info in infos.values() if info.record.handle} == {"n1", "n2"}
    running_there = await b.sessions(SessionFilter(phases=frozenset({"running"})))
    assert [info.record.key.id for info in running_there] == ["k"]
    assert await b.find(at.key.digest()) == [at.key]
    assert await b.interrupt(at.key)
    assert (await running).receipt.ending is Ending.INTERRUPTED
    assert text_of(await run(at, "x")) == "42"
    assert await b.restart(at.key) == 2
    outcome = await run(at, "x")
    assert outcome.receipt.ending is Ending.RAISED
    assert outcome.receipt.epoch == 2


async def test_an_interrupt_ends_what_runs_also_where_a_call_of_this_host_waits_for_it_inside(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    running = await started(attach(a, "k"), ENDLESS, attempt="endless")
    waiting = asyncio.create_task(run(attach(b, "k"), "6 * 7", attempt="waiting"))
    agent = next(iter(cluster.engine.sandboxes.values())).agent
    await until(lambda: "waiting" in agent._attempts)
    assert await b.interrupt(attach(b, "k").key)
    assert (await running).receipt.ending is Ending.INTERRUPTED
    assert text_of(await waiting) == "42"


# --- nodes -----------------------------------------------------------------------------------------------------------


async def test_a_lost_node_is_told_and_the_next_epoch_begins_elsewhere(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    at, bt = attach(a, "k"), attach(b, "k")
    await run(at, "x = 42")
    await run(bt, "x")
    node = cluster.engine.launched[0].node
    running = await started(at, ENDLESS, attempt="endless")
    began = time.monotonic()
    cluster.engine.lose_node(node)
    outcome = await running
    assert time.monotonic() - began < 5
    assert outcome.receipt.ending is Ending.LOST
    assert "variables and files are gone" in outcome.notes[0]
    again = await run(bt, "'x' in globals()")
    assert text_of(again) == "False"
    assert again.receipt.epoch == 2
    assert text_of(await run(at, "1 + 1")) == "2"
    assert (await a.collect(at.key, "endless")).receipt.ending is Ending.LOST
    assert cluster.engine.launched[1].node != node
    assert len(cluster.engine.launched) == 2


async def test_what_nobody_was_told_of_a_lost_node_the_next_outcome_says(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    await run(attach(a, "k"), "x = 42")
    cluster.engine.lose_node(cluster.engine.launched[0].node)
    outcome = await run(attach(b, "k"), "1")
    assert (outcome.state_lost_before or "").endswith("variables and files are gone")
    assert outcome.receipt.epoch == 2
    assert (await run(attach(a, "k"), "1")).state_lost_before is None


async def test_a_node_and_its_sessions_host_lost_together_leave_no_attempt_open(cluster: Cluster) -> None:
    a, b = await cluster.host(), await cluster.host()
    running = await started(attach(a, "k"), ENDLESS, attempt="endless")
    await cluster.kill(a)
    cluster.engine.lose_node(cluster.engine.launched[0].node)
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.sleep(0.3)  # it counts as dead
    assert (await b.collect(attach(b, "k").key, "endless")).receipt.ending is Ending.LOST
    outcome = await run(attach(b, "k"), "1")
    assert outcome.receipt.epoch == 2
    assert "files are gone" in (outcome.state_lost_before or "")


async def test_a_full_cluster_says_so_and_when_to_come_back(cluster: Cluster) -> None:
    a = await cluster.host()
    cluster.engine.capacity = 1
    await run(attach(a, "k"), "1")
    with pytest.raises(NoCapacity, match="at capacity") as caught:
        await run(attach(a, "other"), "1")
    assert caught.value.retry_after_s > 0


# --- the store -------------------------------------------------------------------------------------------------------


async def test_live_sessions_go_on_while_redis_is_away(tmp_path: Path) -> None:
    if redis_server_module.PATH is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    server = RedisServer(tmp_path, durable=True)
    cluster = Cluster(server.url, "t:")
    try:
        a, b = await cluster.host(), await cluster.host()
        at = attach(a, "k")
        await run(at, "x = 42")
        await run(attach(b, "k"), "x")
        server.stop()
        for manager in (a, b):
            assert text_of(await run(attach(manager, "k"), "x")) == "42"
        with pytest.raises(StoreUnavailable, match=r"start it, or mend store\.url"):
            await run(attach(a, "new"), "1")
        server.start()
        outcome = await run(attach(b, "k"), "x", attempt="after")
        assert text_of(outcome) == "42"
        assert text_of(await run(attach(a, "new"), "1")) == "1"
        await a._keeper.settled()
        assert text_of(await a.collect(at.key, "after")) == "42"
    finally:
        await cluster.end()
        server.stop()


async def test_a_store_that_lost_everything_does_not_end_live_sessions(tmp_path: Path) -> None:
    if redis_server_module.PATH is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    server = RedisServer(tmp_path)
    cluster = Cluster(server.url, "t:")
    try:
        a, b = await cluster.host(), await cluster.host()
        at = attach(a, "k")
        await run(at, "x = 42")
        server.stop()
        server.start()
        assert text_of(await run(at, "x")) == "42"

        async def is_known() -> bool:
            return bool(await b.find(at.key.digest()))

        await eventually(is_known)
        assert text_of(await run(attach(b, "k"), "x")) == "42"
        assert len(cluster.engine.launched) == 1
    finally:
        await cluster.end()
        server.stop()
