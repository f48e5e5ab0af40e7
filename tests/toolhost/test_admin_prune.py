"""What `toolhost sessions prune` takes for an orphan: nobody's sandboxes, and those of sessions that are over."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes.errors import EngineUnavailable
from sandboxes.orphans import Left, Verdict, remove, survey
from sandboxes.owner import Owner
from sandboxes.settings import ManagerSettings
from sandboxes.spec import Ending, Execution, PythonCall, Retention
from sandboxes.stores.base import Store
from sandboxes.stores.sqlite import SqliteStore
from sandboxes.testing.fake_backend import FakeBackend, FakeEngine
from sandboxes.testing.host import SuiteHost, attach, crash, request
from tests.support.waiting import until

SETTINGS = ManagerSettings(idle_s=1200, lifetime_s=86_400, grace_s=30)


class Dead:
    """A host that was killed, and what is left of it."""

    def __init__(self, place: Path) -> None:
        self.engine = FakeEngine()
        self.path = place / "ledger.sqlite"
        self.owner = Owner("0123456789abcdef", b"s" * 32)
        self.host = SuiteHost(
            backend=lambda owner: FakeBackend(owner, self.engine),
            store=lambda: SqliteStore(self.path),
            owner=self.owner,
            stranger=Owner("fedcba9876543210", b"x" * 32),
            leftovers=lambda: sorted(self.engine.sandboxes),
            state=place,
        )

    async def after(self, *sessions: tuple[str, Retention], pool: int = 0) -> None:
        """A host that had these sessions, and was killed."""
        manager = self.host.make(pool_size=pool)
        await manager.open()
        for name, retention in sessions:
            await attach(manager, name, retention).run(
                Execution(PythonCall("x = 1; open('/mnt/data/f', 'w').write('1')"))
            )
        if pool:
            await until(lambda: manager.counts["pool"] == pool, "no warm sandbox")
        await crash(manager)

    async def left(self, store: Store | None, later_s: float = 0.0) -> dict[str, Left]:
        backend = FakeBackend(self.owner, self.engine)
        found = await survey(backend, store, self.owner, SETTINGS, time.time() + later_s)
        return {"" if one.record is None else one.record.key.id: one for one in found}


@pytest.fixture
def dead(tmp_path: Path) -> Dead:
    return Dead(tmp_path)


@pytest.fixture
async def store(dead: Dead) -> AsyncIterator[Store]:
    opened = SqliteStore(dead.path)
    await opened.open()
    yield opened
    await opened.close()


@pytest.mark.parametrize(
    ("retention", "later_s", "verdict"),
    [
        (Retention.CONNECTION, 0, Verdict.ORPHAN),
        (Retention.REQUEST, 5, Verdict.HELD),
        (Retention.REQUEST, 31, Verdict.ORPHAN),
        (Retention.CHOSEN, 31, Verdict.HELD),
        (Retention.CHOSEN, 1201, Verdict.ORPHAN),
        (Retention.RETAINED, 1100, Verdict.HELD),
        (Retention.RETAINED, 1201, Verdict.ORPHAN),
    ],
)
async def test_a_session_holds_its_sandbox_as_long_as_the_next_start_would(
    dead: Dead, store: Store, retention: Retention, later_s: float, verdict: Verdict
) -> None:
    await dead.after(("a", retention))
    assert (await dead.left(store, later_s))["a"].verdict is verdict


async def test_a_warm_sandbox_is_nobodys(dead: Dead, store: Store) -> None:
    await dead.after(("a", Retention.RETAINED), pool=1)
    found = await dead.left(store)
    assert (found[""].verdict, found["a"].verdict) == (Verdict.ORPHAN, Verdict.HELD)


async def test_a_sandbox_whose_ticket_is_another_owners_is_nobodys(dead: Dead, store: Store) -> None:
    await dead.after(("a", Retention.RETAINED))
    (sandbox,) = dead.engine.sandboxes.values()
    assert sandbox.agent._claim is not None
    sandbox.agent._claim = ("0" * 64, sandbox.agent._claim[1])
    assert (await dead.left(store))[""].verdict is Verdict.ORPHAN


async def test_one_that_does_not_answer_is_its_sessions_by_what_is_on_record(dead: Dead, store: Store) -> None:
    await dead.after(("a", Retention.RETAINED))
    dead.engine.fails["connect"] = EngineUnavailable("frozen")
    assert (await dead.left(store))["a"].verdict is Verdict.HELD


async def test_one_that_has_ended_goes_and_its_session_keeps_its_files(dead: Dead, store: Store) -> None:
    await dead.after(("a", Retention.RETAINED))
    (sandbox,) = dead.engine.sandboxes.values()
    sandbox.agent.die()
    one = (await dead.left(store))["a"]
    assert (one.verdict, one.keeps_files) == (Verdict.ORPHAN, True)
    await remove(FakeBackend(dead.owner, dead.engine), store, one, time.time())
    assert dead.engine.sandboxes == {}
    async with dead.host.manager() as manager:
        outcome = await attach(manager, "a", Retention.RETAINED).run(
            Execution(PythonCall("open('/mnt/data/f').read()"))
        )
        assert outcome.value == "'1'"
        await manager.close_session(request("a", Retention.RETAINED).key)


async def test_a_removed_session_is_closed_on_record_and_its_running_attempt_is_lost(dead: Dead, store: Store) -> None:
    manager = dead.host.make()
    await manager.open()
    at = attach(manager, "a", Retention.RETAINED)
    running = manager._keeper.spawn(at.run(Execution(PythonCall("while True: pass"), attempt_id="cut")), "test")
    await until(lambda: manager.counts["running"] == 1, "it never ran")
    await crash(manager)
    assert running.done()
    one = (await dead.left(store, 10_000))["a"]
    assert one.verdict is Verdict.HELD, "code that runs is not idle"
    await remove(FakeBackend(dead.owner, dead.engine), store, one, time.time())
    assert dead.engine.sandboxes == dead.engine.workspaces == {}
    record = await store.get(at.key)
    assert record is not None
    assert (record.phase, record.close_reason) == ("closed", "operator")
    attempt = await store.attempt(at.key, "cut")
    assert attempt is not None
    assert attempt.receipt is not None
    assert attempt.receipt.ending is Ending.LOST


async def test_without_a_ledger_nothing_is_known(dead: Dead) -> None:
    await dead.after(("a", Retention.RETAINED), pool=1)
    assert {one.verdict for one in (await dead.left(None)).values()} == {Verdict.UNKNOWN}
