"""No sequence of calls, cancels, deaths and reconnects leaves what is defined: random ones, by hypothesis.

After every step: no transition was refused and nothing failed inside; no attempt ran twice; and every result that a
caller was given can be given again, and is the same.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sandboxes.errors import AttemptConflict, AttemptExpired, AttemptUnknown, IllegalTransition, SandboxError
from sandboxes.spec import Ending, Execution, Outcome, PythonCall, State
from sandboxes.testing.backend_suite import started
from sandboxes.testing.fake_backend import FakeBackend, FakeEngine
from sandboxes.testing.host import Recorder, SuiteHost, attach, crash, text_of, until
from tests.contract.hosts import HOSTS

SESSIONS = st.sampled_from(["a", "b"])
COUNT = "n = globals().get('n', 0) + 1\nn"
DEATHS = ["import os; os._exit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
BOUND_S = 10.0


class Sequences(RuleBasedStateMachine):
    """One host, two sessions, at most one endless call in each."""

    backend = "fake"

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp())
        self.host: SuiteHost = HOSTS[self.backend](self.directory)
        self.recorder = Recorder()
        self.given: dict[tuple[str, str], tuple[str, Outcome]] = {}
        self.endless: dict[str, asyncio.Task[Outcome]] = {}
        self.ran: list[str] = []
        self.attempts = 0

    def perform(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, BOUND_S))

    @initialize()
    def begin(self) -> None:
        self.manager = self.host.make(self.recorder)
        self.perform(self.manager.open())

    # --- what can happen

    async def _call(self, session: str, attempt: str, code: str) -> Outcome:
        outcome = await attach(self.manager, session).run(Execution(PythonCall(code), attempt_id=attempt, timeout_s=10))
        self.given[session, attempt] = (code, outcome)
        return outcome

    def _new_attempt(self) -> str:
        self.attempts += 1
        return f"attempt-{self.attempts}"

    async def _end_endless(self, session: str) -> None:
        call = self.endless.pop(session, None)
        if call is not None:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    @rule(session=SESSIONS)
    def call(self, session: str) -> None:
        async def work() -> None:
            await self._end_endless(session)
            outcome = await self._call(session, self._new_attempt(), COUNT)
            assert outcome.receipt.ending is Ending.OK
            assert int(outcome.value or "0") >= 1
            if outcome.state_lost_before is not None:
                assert outcome.value == "1", outcome

        self.perform(work())

    @rule(session=SESSIONS, code=st.sampled_from(DEATHS))
    def the_interpreter_dies(self, session: str, code: str) -> None:
        async def work() -> None:
            await self._end_endless(session)
            outcome = await self._call(session, self._new_attempt(), code)
            assert (outcome.receipt.ending, outcome.receipt.state) == (Ending.KILLED, State.LOST)
            assert text_of(await self._call(session, self._new_attempt(), COUNT)) == "1"

        self.perform(work())

    @rule(session=SESSIONS)
    def an_endless_call_starts(self, session: str) -> None:
        async def work() -> None:
            if session not in self.endless:
                at = attach(self.manager, session)
                self.endless[session] = await started(at, "while True:\n    pass", attempt=self._new_attempt())

        self.perform(work())

    @rule(session=SESSIONS)
    def a_call_is_cancelled(self, session: str) -> None:
        self.perform(self._end_endless(session))

    @rule(session=SESSIONS)
    def the_operator_interrupts(self, session: str) -> None:
        async def work() -> None:
            call = self.endless.pop(session, None)
            if call is not None:
                assert await self.manager.interrupt(attach(self.manager, session).key)
                assert (await call).receipt.ending is Ending.INTERRUPTED

        self.perform(work())

    @rule(session=SESSIONS)
    def the_sandbox_dies(self, session: str) -> None:
        async def work() -> None:
            found = self.manager._keeper.sessions.get(attach(self.manager, session).key)
            if found is None or found.sandbox is None:
                return
            backend = self.host.backend(self.host.owner)
            await backend.open()
            await backend.destroy(found.sandbox.handle, keep_workspace=True)
            await backend.close()
            call = self.endless.pop(session, None)
            if call is not None:
                assert (await call).receipt.ending is Ending.LOST
            await self._call(session, self._new_attempt(), COUNT)

        self.perform(work())

    @rule(session=SESSIONS)
    def the_connection_breaks(self, session: str) -> None:
        async def work() -> None:
            found = self.manager._keeper.sessions.get(attach(self.manager, session).key)
            client = found.sandbox._client if found is not None and found.sandbox is not None else None
            if client is not None:
                client._channel.writer.transport.abort()
                await asyncio.sleep(0)

        self.perform(work())

    @rule()
    def the_host_dies_and_comes_back(self) -> None:
        async def work() -> None:
            endless = list(self.endless)
            await crash(self.manager)
            await asyncio.gather(*self.endless.values(), return_exceptions=True)
            self.endless.clear()
            self.manager = self.host.make(self.recorder)
            await self.manager.open()
            for found in list(self.manager._keeper.sessions.values()):
                # It goes on inside, and nobody waits for it any more; also one whose cancel died with the host.
                interrupted = await self.manager.interrupt(found.key)
                assert interrupted or found.key not in [attach(self.manager, name).key for name in endless]
                await until(lambda found=found: not found.busy)  # the next host would find it running

        self.perform(work())

    @rule(session=SESSIONS)
    def the_session_is_closed(self, session: str) -> None:
        async def work() -> None:
            await self.manager.close_session(attach(self.manager, session).key)
            call = self.endless.pop(session, None)
            if call is not None:
                await asyncio.gather(call, return_exceptions=True)

        self.perform(work())

    @rule(data=st.data())
    def an_attempt_is_repeated(self, data: st.DataObject) -> None:
        if not self.given:
            return
        session, attempt = data.draw(st.sampled_from(sorted(self.given)))
        code, outcome = self.given[session, attempt]

        async def work() -> None:
            await self._end_endless(session)
            at = attach(self.manager, session)
            try:
                again = await at.run(Execution(PythonCall(code), attempt_id=attempt))
                assert again.receipt == outcome.receipt
                assert text_of(again) == text_of(outcome)
            except AttemptExpired:
                pass  # it ran in a session that is closed
            with pytest.raises((AttemptConflict, AttemptExpired)):
                await at.run(Execution(PythonCall("'other'"), attempt_id=attempt))

        self.perform(work())

    # --- what always holds

    @invariant()
    def nothing_failed_inside(self) -> None:
        bad = [error for _, error in self.recorder.failures if not isinstance(error, SandboxError)]
        bad += [error for _, error in self.recorder.failures if isinstance(error, IllegalTransition)]
        assert bad == []

    @invariant()
    def nothing_ran_twice(self) -> None:
        if not hasattr(self, "manager") or not isinstance(self.manager._backend, FakeBackend):
            return
        engine: FakeEngine = self.manager._backend.engine
        self.ran += [ran for found in engine.sandboxes.values() for ran in found.agent.executed]
        for found in engine.sandboxes.values():
            found.agent.executed.clear()
        assert [attempt for attempt, times in Counter(self.ran).items() if times > 1] == []

    @invariant()
    def nothing_that_was_given_is_lost(self) -> None:
        if not hasattr(self, "manager"):
            return

        async def work() -> None:
            for (session, attempt), (_, outcome) in self.given.items():
                try:
                    known = await self.manager.collect(attach(self.manager, session).key, attempt)
                except AttemptUnknown as error:
                    raise AssertionError(f"{session} {attempt} was given, and is not known any more") from error
                assert known.receipt == outcome.receipt, (known, outcome)
                assert text_of(known) == text_of(outcome)

        self.perform(work())

    def teardown(self) -> None:
        async def work() -> None:
            for session in list(self.endless):
                await self._end_endless(session)
            await self.manager.close()
            await self.host.clear()

        try:
            if hasattr(self, "manager"):
                self.perform(work())
        finally:
            self.loop.close()
            shutil.rmtree(self.directory, ignore_errors=True)


class OnBubblewrap(Sequences):
    backend = "bubblewrap"


CHECKS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.timeout(300)
def test_no_sequence_leaves_what_is_defined() -> None:
    run_state_machine_as_test(Sequences, settings=settings(max_examples=40, stateful_step_count=20, **CHECKS))


@pytest.mark.bubblewrap
@pytest.mark.timeout(300)
def test_no_short_sequence_leaves_what_is_defined_on_bubblewrap() -> None:
    run_state_machine_as_test(OnBubblewrap, settings=settings(max_examples=4, stateful_step_count=8, **CHECKS))


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [Sequences, pytest.param(OnBubblewrap, marks=pytest.mark.bubblewrap)])
def test_no_long_sequence_leaves_what_is_defined(machine: type[Sequences]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=50, **CHECKS))
