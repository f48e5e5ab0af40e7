"""What went wrong between host, transport and engine in other code-execution tools, on every backend: never here.

A test module has `class TestCases(CaseSuite)` and a fixture `host` that gives a `SuiteHost`. The backend under the
manager is wrapped, so that engines can hang and transports break.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from sandboxes.client import AgentClient, Bound
from sandboxes.errors import SandboxError
from sandboxes.lifecycle import Phase
from sandboxes.spec import Ending, Execution, PythonCall, Retention
from sandboxes.stores.base import SessionFilter
from sandboxes.testing.backend_suite import SOON_S, run, started
from sandboxes.testing.faulty import FaultyBackend
from sandboxes.testing.host import SuiteHost, attach, crash, request, text_of, until


def faulty(host: SuiteHost) -> list[FaultyBackend]:
    """Wraps the host's backends from here on; the list has those that were made."""
    made: list[FaultyBackend] = []
    make = host.backend

    def wrapped(owner: object) -> FaultyBackend:
        made.append(FaultyBackend(make(owner)))  # type: ignore[arg-type]  # handed on as it came
        return made[-1]

    host.backend = wrapped
    return made


class CaseSuite:
    """See the module."""

    async def test_a_transport_that_broke_while_idle_or_in_mid_call_costs_no_result(self, host: SuiteHost) -> None:
        made = faulty(host)
        async with host.manager() as manager:
            at = attach(manager, "a")
            await run(at, "n = 0")
            made[0].drop_channels()
            assert text_of(await run(at, "n += 1\nn", attempt="idle")) == "1"
            call = await started(at, "import time\nprint('begun')\ntime.sleep(1)\nn += 1\nn", attempt="running")
            made[0].drop_channels()
            outcome = await asyncio.wait_for(call, SOON_S)
            assert (outcome.output.head, outcome.value) == ("begun\n", "2")
            assert (await manager.collect(at.key, "running")).receipt == outcome.receipt
            assert text_of(await run(at, "n")) == "2"

    async def test_a_slow_launch_delays_nobody_else_and_leaks_nothing(self, host: SuiteHost) -> None:
        made = faulty(host)
        async with host.manager() as manager:
            made[0].slow = {"first"}
            slow = asyncio.create_task(run(attach(manager, "slow", Retention.REQUEST), "'slow'"))
            await asyncio.wait_for(made[0].waiting.wait(), SOON_S)
            quick = attach(manager, "quick", Retention.REQUEST)
            assert text_of(await asyncio.wait_for(run(quick, "'quick'"), SOON_S)) == "'quick'"
            assert not slow.done()
            made[0].go_on.set()
            assert text_of(await slow) == "'slow'"
        assert host.leftovers() == []

    async def test_a_hung_engine_call_delays_nobody_else(self, host: SuiteHost) -> None:
        made = faulty(host)
        async with host.manager(engine_s=2.0, destroy_s=2.0, shutdown_s=4.0) as manager:
            one, other = attach(manager, "a"), attach(manager, "b")
            await asyncio.gather(run(one, "x = 1"), run(other, "x = 2"))
            made[0].hung = {"usage", "destroy", "poll"}
            listed = asyncio.create_task(manager.sessions())
            closing = asyncio.create_task(manager.close_session(one.key))
            assert text_of(await asyncio.wait_for(run(other, "x"), SOON_S)) == "2"
            assert text_of(await asyncio.wait_for(run(attach(manager, "c"), "'new'"), SOON_S)) == "'new'"
            assert len(await asyncio.wait_for(listed, SOON_S)) >= 2
            await asyncio.wait_for(closing, SOON_S)
            made[0].hung = set()
            await until(lambda: manager.counts["closing"] == 0)

    async def test_many_engine_calls_at_once_all_answer(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            handles = await asyncio.gather(*(backend.launch(f"k-{n}", host.spec, f"w-{n}") for n in range(3)))
            asked = [backend.usage(handle) for handle in handles for _ in range(20)]
            looked = [backend.poll(handle) for handle in handles for _ in range(20)]
            async with asyncio.timeout(SOON_S):
                usages = await asyncio.gather(*asked)
                await asyncio.gather(*looked)
            assert len(usages) == 60

    async def test_a_sandbox_takes_code_in_the_moment_its_launch_returns(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            for number in range(3):
                name = f"k-{number}"
                handle = await backend.launch(name, host.spec, name)
                client = await AgentClient.connect(await backend.connect(handle))
                await client.claim("t" * 64, "p/request/s", 1, 0)
                call = PythonCall("6 * 7")
                outcome = await client.execute(
                    name, Execution(call).digest(), call, Bound(20.0, 1.0), cap=100, queued_at=0.0
                )
                await client.close()
                assert outcome.value == "42"

    async def test_a_client_that_died_without_cleaning_up_leaves_nothing_after_its_grace(self, host: SuiteHost) -> None:
        async with host.manager(grace_s=0.5, sweep_s=0.1) as manager:
            at = attach(manager, "a", Retention.REQUEST)
            call = await started(at, "while True: pass", attempt="endless")
            await at.gone()
            assert (await asyncio.wait_for(call, SOON_S)).receipt.ending is Ending.INTERRUPTED
            await until(lambda: manager.counts[Phase.IDLE] + manager.counts[Phase.RUNNING] == 0)
            await until(lambda: manager.counts[Phase.CLOSING] == 0)
            closed = await manager.sessions(SessionFilter(include_closed=True))
            assert [info.record.close_reason for info in closed] == ["disconnect"]
        assert host.leftovers() == []

    async def test_waiting_for_a_place_is_not_charged_to_the_code(self, host: SuiteHost) -> None:
        async with host.manager(max_sessions=1, queue_s=60.0) as manager:

            async def one(number: int) -> None:
                at = attach(manager, f"s{number}", Retention.REQUEST)
                outcome = await run(at, "import time\ntime.sleep(0.5)\n'done'", timeout_s=2.9)
                await at.cleanup()
                receipt = outcome.receipt
                assert (text_of(outcome), receipt.ending) == ("'done'", Ending.OK)
                assert receipt.started_at is not None
                waits.append(receipt.started_at - receipt.queued_at)

            waits: list[float] = []
            await asyncio.gather(*(one(number) for number in range(7)))
            assert max(waits) > 2.9  # longer than its code may take

    async def test_health_runs_code_and_is_ill_when_calls_cannot_run(self, host: SuiteHost) -> None:
        made = faulty(host)
        async with host.manager(engine_s=1.0, health_kept_s=0.0) as manager:
            await manager.health()
            made[0].hung = {"connect"}
            began = time.monotonic()
            with pytest.raises(SandboxError):
                await manager.health()
            assert time.monotonic() - began < SOON_S
            made[0].hung = set()
            await manager.health()

    async def test_after_a_restart_the_same_python_answers_and_orphans_are_gone(self, host: SuiteHost) -> None:
        manager = host.make()
        await manager.open()
        await run(attach(manager, "kept"), "x = 41")
        await run(attach(manager, "passing", Retention.CONNECTION), "x = 1")
        await crash(manager)
        async with host.manager(grace_s=0.2, sweep_s=0.1) as manager:
            outcome = await run(attach(manager, "kept"), "x + 1")
            assert (text_of(outcome), outcome.receipt.epoch, outcome.state_lost_before) == ("42", 1, None)
            passing = request("passing", Retention.CONNECTION).key
            await until(lambda: passing not in [session.key for session in manager._keeper.sessions.values()])
            backend = host.backend(host.owner)
            await backend.open()
            assert len(await backend.list_owned()) == 1
            await backend.close()

    async def test_sessions_that_nobody_uses_have_no_interface_of_any_network(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            code = "[line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]"
            seen = await asyncio.gather(*(run(attach(manager, f"s{number}"), code) for number in range(4)))
            assert {text_of(outcome) for outcome in seen} <= {"['lo']", "[]"}
