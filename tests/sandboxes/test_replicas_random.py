"""No sequence of calls, kills of hosts, losses of nodes and closings at two hosts leaves what is defined.

Seeded by hypothesis. After every step: every call has its one answer, nothing ran twice, what a caller was given can be
given again at any host, and a counter in the session counts without a gap unless the outcome says that state was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sandboxes.errors import AttemptExpired, AttemptUnknown, IllegalTransition, SandboxError
from sandboxes.manager import SessionManager
from sandboxes.spec import Ending, Execution, Outcome, PythonCall
from sandboxes.testing.host import attach, text_of
from tests.sandboxes.test_replicas import Cluster

COUNT = "n = globals().get('n', 0) + 1\nn"
SLOW = "import asyncio\nawait asyncio.sleep(0.02)\n" + COUNT
SESSIONS = st.sampled_from(["a", "b", "c"])
HOSTS = st.sampled_from([0, 1])
BOUND_S = 20.0


class Sequences(RuleBasedStateMachine):
    """Two hosts, two nodes, three sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.cluster = Cluster(None, "")
        self.hosts: list[SessionManager] = []
        self.given: dict[tuple[str, str], Outcome] = {}
        self.counted: dict[str, int] = {}
        self.reset: set[str] = set()  # sessions whose next count may begin anew without a word: a loss was told already
        self.ran: Counter[str] = Counter()
        self.names = itertools.count()
        self.agents: dict[str, Any] = {}

    def perform(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, BOUND_S))

    async def _host(self) -> SessionManager:
        return await self.cluster.host(orphan_sweep_s=0.05, launch_s=2.0)

    @initialize()
    def begin(self) -> None:
        self.hosts = [self.perform(self._host()) for _ in range(2)]

    async def _call(self, host: int, session: str, code: str = COUNT) -> None:
        attempt = f"attempt-{next(self.names)}"
        at = attach(self.hosts[host], session)
        outcome = await at.run(Execution(PythonCall(code), attempt_id=attempt, timeout_s=10))
        await at.gone()
        self.given[session, attempt] = outcome
        receipt = outcome.receipt
        if receipt.ending is not Ending.OK:
            assert receipt.ending in (Ending.LOST, Ending.KILLED, Ending.NEVER_STARTED), outcome
            self.reset.add(session)
            return
        number = int(text_of(outcome))
        if number != self.counted.get(session, 0) + 1:
            assert outcome.state_lost_before is not None or session in self.reset, (outcome, self.counted)
        if number == 1:
            self.reset.discard(session)
        self.counted[session] = number

    # --- what can happen

    @rule(host=HOSTS, session=SESSIONS)
    def a_call(self, host: int, session: str) -> None:
        self.perform(self._call(host, session))

    @rule(session=SESSIONS)
    def calls_at_both_hosts_at_once(self, session: str) -> None:
        async def work() -> None:
            before = self.counted.get(session, 0)
            calls = []
            for host in (0, 1):
                attempt = f"attempt-{next(self.names)}"
                at = attach(self.hosts[host], session)
                calls.append((attempt, at.run(Execution(PythonCall(COUNT), attempt_id=attempt, timeout_s=10))))
            outcomes = await asyncio.gather(*(call for _, call in calls))
            for (attempt, _), outcome in zip(calls, outcomes, strict=True):
                self.given[session, attempt] = outcome
                assert outcome.receipt.ending is Ending.OK, outcome
            numbers = sorted(int(text_of(outcome)) for outcome in outcomes)
            told = any(outcome.state_lost_before is not None for outcome in outcomes) or session in self.reset
            assert numbers == [before + 1, before + 2] or (told and numbers == [1, 2]), (numbers, before, outcomes)
            self.counted[session] = numbers[-1]
            self.reset.discard(session)

        self.perform(work())

    @rule(host=HOSTS, session=SESSIONS)
    def a_host_dies_during_a_call(self, host: int, session: str) -> None:
        async def work() -> None:
            attempt = f"attempt-{next(self.names)}"
            at = attach(self.hosts[host], session)
            call = asyncio.create_task(at.run(Execution(PythonCall(SLOW), attempt_id=attempt, timeout_s=10)))
            await asyncio.sleep(0.01)
            await self.cluster.kill(self.hosts[host])
            await asyncio.gather(call, return_exceptions=True)
            key = at.key
            with contextlib.suppress(AttemptUnknown, SandboxError):
                outcome = await self.hosts[1 - host].collect(key, attempt)
                if outcome.receipt.ending is Ending.OK:
                    self.given[session, attempt] = outcome
                    self.counted[session] = int(text_of(outcome))
            again = await attach(self.hosts[1 - host], session).run(
                Execution(PythonCall(SLOW), attempt_id=attempt, timeout_s=10)
            )
            self.given[session, attempt] = again
            if again.receipt.ending is Ending.OK:
                self.counted[session] = int(text_of(again))
            self.hosts[host] = await self._host()

        self.perform(work())

    @rule()
    def a_node_is_lost(self) -> None:
        async def work() -> None:
            name = f"node{next(self.names)}"
            self._note_runs()
            self.cluster.engine.nodes.append(name)
            self.cluster.engine.lose_node(self.cluster.engine.nodes[0])

        self.perform(work())

    @rule(host=HOSTS, session=SESSIONS)
    def a_node_is_lost_during_a_call(self, host: int, session: str) -> None:
        async def work() -> None:
            call = asyncio.create_task(self._call(host, session, SLOW))
            await asyncio.sleep(0.01)
            self._note_runs()
            self.cluster.engine.nodes.append(f"node{next(self.names)}")
            self.cluster.engine.lose_node(self.cluster.engine.nodes[0])
            await call

        self.perform(work())

    @rule(host=HOSTS, session=SESSIONS)
    def an_operator_closes(self, host: int, session: str) -> None:
        async def work() -> None:
            self._note_runs()
            await self.hosts[host].close_session(attach(self.hosts[host], session).key)

        self.perform(work())

    @rule(host=HOSTS, session=SESSIONS)
    def a_client_cleans_up(self, host: int, session: str) -> None:
        async def work() -> None:
            at = attach(self.hosts[host], session)
            attempt = f"attempt-{next(self.names)}"
            outcome = await at.run(Execution(PythonCall(COUNT), attempt_id=attempt, timeout_s=10))
            self.given[session, attempt] = outcome
            if outcome.receipt.ending is Ending.OK:
                self.counted[session] = int(text_of(outcome))
            else:
                self.reset.add(session)
            self._note_runs()
            await at.cleanup()

        self.perform(work())

    @rule(host=HOSTS, data=st.data())
    def an_attempt_is_repeated(self, host: int, data: st.DataObject) -> None:
        if not self.given:
            return
        session, attempt = data.draw(st.sampled_from(sorted(self.given)))

        async def work() -> None:
            try:
                code = COUNT
                again = await attach(self.hosts[host], session).run(
                    Execution(PythonCall(code), attempt_id=attempt, timeout_s=10)
                )
                assert again.receipt == self.given[session, attempt].receipt
            except SandboxError:  # other arguments (the slow ones), or of a closed session
                pass

        self.perform(work())

    # --- what always holds

    def _note_runs(self) -> None:
        for found in self.cluster.engine.sandboxes.values():
            self.ran.update(found.agent.executed)
            found.agent.executed.clear()

    @invariant()
    def nothing_ran_twice(self) -> None:
        self._note_runs()
        assert [attempt for attempt, times in self.ran.items() if times > 1] == []

    @invariant()
    def nothing_failed_inside(self) -> None:
        failures = self.cluster.recorder.failures
        expected = (SandboxError, asyncio.CancelledError)  # of hosts that were killed
        bad = [error for _, error in failures if not isinstance(error, expected)]
        bad += [error for _, error in failures if isinstance(error, IllegalTransition)]
        assert bad == []

    @invariant()
    def what_was_given_is_known_at_every_host(self) -> None:
        async def work() -> None:
            for host in self.hosts:
                await host._keeper.settled()
            for (session, attempt), outcome in list(self.given.items())[-5:]:
                for host in self.hosts:
                    with contextlib.suppress(AttemptExpired):
                        known = await host.collect(attach(host, session).key, attempt)
                        assert known.receipt == outcome.receipt, (known, outcome)

        if self.hosts:
            self.perform(work())

    def teardown(self) -> None:
        try:
            self.perform(self.cluster.end())
        finally:
            self.loop.close()


CHECKS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.timeout(300)
def test_no_sequence_leaves_what_is_defined() -> None:
    run_state_machine_as_test(Sequences, settings=settings(max_examples=15, stateful_step_count=12, **CHECKS))


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_no_long_sequence_leaves_what_is_defined() -> None:
    run_state_machine_as_test(Sequences, settings=settings(max_examples=200, stateful_step_count=40, **CHECKS))
