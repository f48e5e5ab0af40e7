"""The contract suite of backends: the same bodies for each, through the contract and through the manager.

A test module has `class TestBackend(BackendSuite)` and a fixture `host` that gives a `SuiteHost`. Where a backend does
not give a guarantee, it says so in `differences`, and the test asserts what is the case there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from sandboxes.backends.base import Life
from sandboxes.client import AgentClient
from sandboxes.errors import AttemptConflict, AttemptUnknown, CallRefused, ChannelLost, StateLost
from sandboxes.events import ExecutionEvent, Printed, Started
from sandboxes.lifecycle import Phase
from sandboxes.manager import Attachment
from sandboxes.spec import CauseKind, Ending, Execution, Outcome, PythonCall, Retention, Rung, State
from sandboxes.stores.base import SessionFilter
from sandboxes.testing.host import Recorder, SuiteHost, attach, crash, request, text_of, until

ENDLESS = "while True:\n    pass"
STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun')\nwhile True:\n    pass"
BEGUN = f"print('begun')\n{ENDLESS}"  # for `begun`
SOON_S = 20.0  # a bound, not an expectation
BRIEF_S = 2.0  # a deadline to be met by what hangs: code that is to hang by then must have got there on a busy machine

# Waits for a file that the test makes.
UNTIL_GO = """import asyncio
while True:
    try:
        open('/mnt/data/go').close()
        break
    except OSError:
        await asyncio.sleep(0.01)
"""


async def run(at: Attachment, code: str, *, attempt: str = "", timeout_s: float = 20.0) -> Outcome:
    return await at.run(Execution(PythonCall(code), attempt_id=attempt, timeout_s=timeout_s))


async def started(at: Attachment, code: str, *, attempt: str = "") -> asyncio.Task[Outcome]:
    """A call whose code was sent to its interpreter. Where it matters how far it has come, use `begun`."""
    return await _call(at, code, attempt, Started)


async def begun(at: Attachment, code: str, *, attempt: str = "") -> asyncio.Task[Outcome]:
    """A call whose code has printed: what it does before that is done."""
    return await _call(at, code, attempt, Printed)


async def _call(at: Attachment, code: str, attempt: str, sign: type[ExecutionEvent]) -> asyncio.Task[Outcome]:
    running = asyncio.Event()

    def on_event(event: ExecutionEvent) -> None:
        if isinstance(event, sign):
            running.set()

    call = asyncio.create_task(at.run(Execution(PythonCall(code), attempt_id=attempt, timeout_s=60), on_event))
    wait = asyncio.create_task(running.wait())
    await asyncio.wait({call, wait}, timeout=SOON_S, return_when=asyncio.FIRST_COMPLETED)
    wait.cancel()
    assert running.is_set(), call
    return call


class BackendSuite:
    """Contract first, then what stands on it."""

    # --- the contract ------------------------------------------------------------------------------------------------

    async def test_a_launched_sandbox_answers_and_names_itself(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            handle = await backend.launch("k-1", host.spec, "w-1")
            assert (handle.key, handle.workspace, handle.backend) == ("k-1", "w-1", backend.name)
            client = await AgentClient.connect(await backend.connect(handle))
            assert client.hello.sandbox == handle.sandbox_id
            assert client.hello.claim is None
            await client.ping()
            await client.close()
            assert (await backend.poll(handle)).life is Life.RUNNING

    async def test_launching_a_running_key_returns_what_runs(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            first, second = await asyncio.gather(*(backend.launch("k-1", host.spec, "w-1") for _ in range(2)))
            assert first == second == await backend.lookup("k-1")
            assert await backend.list_owned() == [first]
            assert await backend.lookup("k-2") is None

    async def test_another_instance_is_refused(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            handle = await backend.launch("k-1", host.spec, "w-1")
            with pytest.raises(StateLost):
                await backend.connect(dataclasses.replace(handle, instance="another"))

    async def test_connecting_that_is_given_up_at_any_moment_harms_no_other_one(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            handle = await backend.launch("k-1", host.spec, "w-1")
            earlier = await AgentClient.connect(await backend.connect(handle))
            for steps in range(12):
                given_up = asyncio.create_task(backend.connect(handle))
                for _ in range(steps):
                    await asyncio.sleep(0 if steps % 2 else 0.001)
                given_up.cancel()
                channel = (await asyncio.gather(given_up, return_exceptions=True))[0]
                if not isinstance(channel, BaseException):
                    await channel.close()
                client = await AgentClient.connect(await backend.connect(handle))
                await client.ping()
                await client.close()
            with contextlib.suppress(ChannelLost):  # where a sandbox has one host at a time
                await earlier.ping()
            await earlier.close()

    async def test_a_destroyed_sandbox_is_gone_and_destroying_it_again_changes_nothing(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            handle = await backend.launch("k-1", host.spec, "w-1")
            await backend.destroy(handle)
            await backend.destroy(handle)
            assert (await backend.poll(handle)).life is Life.GONE
            assert await backend.list_owned() == []
            with pytest.raises(StateLost):
                await backend.connect(handle)
        assert host.leftovers() == []

    async def test_a_kept_workspace_has_its_files_for_the_next_sandbox(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            handle = await backend.launch("k-1", host.spec, "w-1")
            client = await AgentClient.connect(await backend.connect(handle))
            await client.put_file("kept.txt", "u1", 0, b"hello", last=True)
            await client.close()
            await backend.destroy(handle, keep_workspace=True)
            again = await backend.launch("k-1", host.spec, "w-1")
            assert again.instance != handle.instance
            client = await AgentClient.connect(await backend.connect(again))
            assert b"".join([piece async for piece in client.get_file("kept.txt", 100)]) == b"hello"
            await client.close()
            await backend.destroy(again, keep_workspace=True)
        async with host.opened(launching=False) as backend:
            assert (await backend.list_owned(), await backend.list_workspaces()) == ([], ["w-1"])
            await backend.remove_workspace("w-1")
            await backend.remove_workspace("w-1")
            assert await backend.list_workspaces() == []
        assert host.leftovers() == []

    async def test_a_cancelled_launch_leaves_nothing(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            for turns in (1, 3, 10):
                launch = asyncio.create_task(backend.launch("k-1", host.spec, "w-1"))
                for _ in range(turns):
                    await asyncio.sleep(0.001)
                launch.cancel()
                ended = (await asyncio.gather(launch, return_exceptions=True))[0]
                if isinstance(ended, asyncio.CancelledError):
                    assert await backend.list_owned() == []
        assert host.leftovers() == []

    async def test_only_its_owners_sandboxes_are_listed(self, host: SuiteHost) -> None:
        async with host.opened() as ours, host.opened(host.stranger) as theirs:
            mine = await ours.launch("k-1", host.spec, "w-1")
            other = await theirs.launch("k-2", host.spec, "w-2")
            assert await ours.list_owned() == [mine]
            assert await theirs.list_owned() == [other]

    async def test_usage_is_known_while_it_runs(self, host: SuiteHost) -> None:
        async with host.opened() as backend:
            handle = await backend.launch("k-1", host.spec, "w-1")
            usage = await backend.usage(handle)
            assert usage.memory_bytes is None or usage.memory_bytes > 0
            await backend.destroy(handle)
            with pytest.raises(StateLost):
                await backend.usage(handle)

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def test_connecting_costs_no_sandbox_and_variables_persist_across_connections(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            first = attach(manager, "a")
            assert await manager.sessions() == []
            await run(first, "x = 41")
            await first.gone()
            assert text_of(await run(attach(manager, "a"), "x + 1")) == "42"
            other = await run(attach(manager, "b"), "x + 1")
            assert other.receipt.ending is Ending.RAISED
            assert "NameError" in (other.error or "")
            assert len(await manager.sessions()) == 2

    async def test_epochs_and_sequence_numbers_count_up(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            receipts = [(await run(at, code)).receipt for code in ("1", "2", "import os; os._exit(3)", "4")]
            assert [receipt.sequence for receipt in receipts] == [1, 2, 3, 4]
            assert [receipt.epoch for receipt in receipts] == [1, 1, 1, 2]

    async def test_output_comes_as_it_appears_and_whole_in_the_end(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            seen: list[ExecutionEvent] = []
            code = "import asyncio\nprint('a', end='')\nawait asyncio.sleep(0.2)\nprint('b')"
            outcome = await attach(manager, "a").run(Execution(PythonCall(code)), seen.append)
            assert outcome.output.head == "ab\n"
            assert isinstance(seen[0], Started)
            assert "".join(event.text for event in seen if isinstance(event, Printed)).startswith("a")

    async def test_a_time_out_keeps_variables_and_partial_output(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            await run(at, "x = 1")
            for endless in (ENDLESS, "import time\ntime.sleep(1e9)", "import asyncio\nawait asyncio.Event().wait()"):
                outcome = await run(at, f"print('begun')\n{endless}", timeout_s=BRIEF_S)
                assert outcome.receipt.ending is Ending.TIMED_OUT
                assert outcome.receipt.state is State.KEPT
                assert outcome.receipt.cause is not None
                assert outcome.receipt.cause.kind is CauseKind.DEADLINE
                assert outcome.output.head == "begun\n"
                assert text_of(await run(at, "x")) == "1"

    async def test_what_ignores_interrupts_is_killed_and_the_next_call_works(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            outcome = await run(at, STUBBORN, timeout_s=BRIEF_S)
            assert outcome.receipt.state is State.LOST
            assert outcome.receipt.cause is not None
            assert outcome.receipt.cause.rung is Rung.KILL
            after = await run(at, "1 + 1")
            assert (text_of(after), after.receipt.epoch) == ("2", 2)

    @pytest.mark.parametrize(
        ("code", "cause"),
        [
            ("import os; os._exit(3)", CauseKind.EXIT),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", CauseKind.SIGNAL),
            ("import os; os.abort()", CauseKind.SIGNAL),
        ],
    )
    async def test_a_dead_interpreter_is_named_and_replaced(self, host: SuiteHost, code: str, cause: CauseKind) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            outcome = await run(at, code)
            assert outcome.receipt.ending is Ending.KILLED
            assert outcome.receipt.cause is not None
            assert outcome.receipt.cause.kind is cause
            assert text_of(await run(at, "1 + 1")) == "2"

    async def test_cancelling_a_call_ends_its_code_and_keeps_variables_and_receipt(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            await run(at, "x = 5")
            call = await begun(at, BEGUN, attempt="endless")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert text_of(await run(at, "x")) == "5"
            collected = await manager.collect(at.key, "endless")
            assert collected.receipt.ending is Ending.INTERRUPTED

    async def test_the_operator_can_interrupt_and_restart(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            call = await begun(at, BEGUN)
            assert await manager.interrupt(at.key)
            assert (await call).receipt.ending is Ending.INTERRUPTED
            await run(at, "x = 1")
            epoch = await manager.restart(at.key)
            outcome = await run(at, "x")
            assert outcome.receipt.ending is Ending.RAISED
            assert outcome.receipt.epoch == epoch == 2
            assert outcome.state_lost_before is not None

    async def test_calls_of_a_session_run_in_order_and_do_not_delay_another_session(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            await run(at, "order = []")
            first = await started(at, f"order.append(0)\n{UNTIL_GO}")
            rest = [asyncio.create_task(run(at, f"order.append({n})")) for n in (1, 2, 3)]
            assert text_of(await run(attach(manager, "b"), "'prompt'")) == "'prompt'"
            assert not first.done()
            await manager.files(at.key).put("go", _nothing(), 1)
            await asyncio.gather(first, *rest)
            assert text_of(await run(at, "order")) == "[0, 1, 2, 3]"

    async def test_many_sessions_at_once_each_have_their_own_variables(self, host: SuiteHost) -> None:
        async with host.manager() as manager:

            async def one(number: int) -> str:
                at = attach(manager, f"s{number}")
                await run(at, f"x = {number}")
                return text_of(await run(at, "x"))

            assert await asyncio.gather(*(one(number) for number in range(8))) == [str(n) for n in range(8)]

    # --- attempts ----------------------------------------------------------------------------------------------------

    async def test_an_attempt_runs_once(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            await run(at, "n = 0")
            first = await run(at, "n += 1; n", attempt="one")
            assert await run(at, "n += 1; n", attempt="one") == first
            with pytest.raises(AttemptConflict):
                await run(at, "n += 2; n", attempt="one")
            slow = "import asyncio\nn += 1\nawait asyncio.sleep(0.3)\nn"
            joined = await asyncio.gather(*(run(at, slow, attempt="two") for _ in range(3)))
            assert [outcome.receipt.attempt_id for outcome in joined] == ["two"] * 3
            assert text_of(await run(at, "n")) == "2"
            assert await manager.collect(at.key, "one") == first
            with pytest.raises(AttemptUnknown):
                await manager.collect(at.key, "three")

    # --- recovery ----------------------------------------------------------------------------------------------------

    async def test_a_crashed_hosts_sessions_answer_with_their_variables(self, host: SuiteHost) -> None:
        manager = host.make()
        await manager.open()
        for number in range(3):
            await run(attach(manager, f"s{number}"), f"x = {number}")
        await crash(manager)
        async with host.manager() as manager:
            assert manager.adopted.sessions == 3
            for number in range(3):
                outcome = await run(attach(manager, f"s{number}"), "x")
                assert text_of(outcome) == str(number)
                assert outcome.state_lost_before is None
                assert outcome.receipt.sequence == 2

    async def test_what_ran_at_the_crash_can_be_interrupted_at_once(self, host: SuiteHost) -> None:
        manager = host.make()
        await manager.open()
        await run(attach(manager, "a"), "x = 42", attempt="done")
        call = await begun(attach(manager, "a"), BEGUN, attempt="endless")
        await crash(manager)
        await asyncio.gather(call, return_exceptions=True)
        async with host.manager() as manager:
            at = attach(manager, "a")
            assert await manager.interrupt(at.key)  # "done", which is not acknowledged yet, is fetched before it
            outcome = await asyncio.wait_for(manager.collect(at.key, "endless"), SOON_S)
            assert outcome.receipt.ending is Ending.INTERRUPTED
            assert (await manager.collect(at.key, "done")).receipt.ending is Ending.OK
            assert text_of(await run(at, "x")) == "42"

    async def test_an_attempt_that_ran_at_the_crash_is_collected_and_not_run_again(self, host: SuiteHost) -> None:
        manager = host.make()
        await manager.open()
        at = attach(manager, "a")
        await run(at, "n = 0")
        code = "import asyncio\nn += 1\nawait asyncio.sleep(1)\nn"
        call = await started(at, code, attempt="long")
        await crash(manager)
        await asyncio.gather(call, return_exceptions=True)
        async with host.manager() as manager:
            collected = await manager.collect(at.key, "long")
            assert text_of(collected) == "1"
            at = attach(manager, "a")
            assert (await run(at, code, attempt="long")).receipt == collected.receipt
            assert text_of(await run(at, "n")) == "1"

    async def test_an_outcome_that_came_while_no_host_was_there_is_kept_for_the_next(self, host: SuiteHost) -> None:
        manager = host.make()
        await manager.open()
        at = attach(manager, "a")
        call = await started(at, "import asyncio\nawait asyncio.sleep(0.2)\n'late'", attempt="late")
        await crash(manager)
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.6)  # nobody is there to tell when it ends
        async with host.manager() as manager:
            assert text_of(await manager.collect(at.key, "late")) == "'late'"

    async def test_what_nobody_claims_is_removed_at_start_and_others_are_left_alone(self, host: SuiteHost) -> None:
        stranger = host.backend(host.stranger)
        await stranger.open()
        other = await stranger.launch("k-other", host.spec, "w-other")
        backend = host.backend(host.owner)
        await backend.open()
        await backend.launch("k-orphan", host.spec, "w-orphan")
        await backend.close()
        async with host.manager() as manager:
            assert manager.adopted.removed == 1
            assert (await stranger.poll(other)).life is Life.RUNNING
        await stranger.destroy(other)
        await stranger.close()
        assert host.leftovers() == []

    async def test_a_sandbox_removed_from_outside_is_told_and_its_files_are_kept(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            # Synced: gVisor may hold what was written, and this sandbox ends without a warning.
            write = "f.write('text')\nf.flush()\nos.fsync(f.fileno())\nf.close()"
            code = f"import os\nx = 1\nf = open('/mnt/data/kept.txt', 'w')\n{write}"
            assert (await run(at, code)).receipt.ending is Ending.OK
            backend = host.backend(host.owner)
            await backend.open()
            [handle] = await backend.list_owned()
            await backend.destroy(handle, keep_workspace=True)
            outcome = await run(at, "open('/mnt/data/kept.txt').read()")
            assert text_of(outcome) == "'text'"
            assert outcome.receipt.epoch == 2
            assert "variables are lost" in (outcome.state_lost_before or "")
            assert (await run(at, "1")).state_lost_before is None
            await backend.close()

    async def test_a_sandbox_lost_in_mid_call_is_an_outcome_and_the_next_call_works(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            call = await started(at, ENDLESS, attempt="doomed")
            backend = host.backend(host.owner)
            await backend.open()
            [handle] = await backend.list_owned()
            await backend.destroy(handle, keep_workspace=True)
            outcome = await asyncio.wait_for(call, SOON_S)
            assert outcome.receipt.ending is Ending.LOST
            assert outcome.receipt.state is State.LOST
            assert (await manager.collect(at.key, "doomed")).receipt.ending is Ending.LOST
            assert text_of(await run(at, "1 + 1")) == "2"
            await backend.close()

    # --- endings -----------------------------------------------------------------------------------------------------

    async def test_nothing_is_left_when_sessions_have_been_cleaned_up(self, host: SuiteHost) -> None:
        async with host.manager(pool_size=1) as manager:
            held = [attach(manager, f"s{number}", Retention.REQUEST) for number in range(3)]
            await asyncio.gather(*(run(at, "x = 1") for at in held))
            call = await started(held[0], ENDLESS)
            for at in held:
                await at.cleanup()
                await at.cleanup()
            cut = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(cut[0], Outcome)
            assert cut[0].receipt.ending is not Ending.OK
        assert host.leftovers() == []

    async def test_a_closed_sessions_next_call_says_that_state_was_lost(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            await run(at, "x = 1")
            await at.cleanup()
            outcome = await run(at, "x")
            assert outcome.receipt.ending is Ending.RAISED
            assert "cleaned it up" in (outcome.state_lost_before or "")
            closed = await manager.sessions(SessionFilter(include_closed=True, phases=frozenset({Phase.CLOSED})))
            assert [info.record.close_reason for info in closed] == ["cleanup"]

    async def test_a_stop_leaves_chosen_and_retained_sessions_for_the_next_start(self, host: SuiteHost) -> None:
        async with host.manager(pool_size=1) as manager:
            for retention in Retention:
                await run(attach(manager, retention.value, retention), "x = 1")
        recorder = Recorder()
        async with host.manager(recorder, keep_on_shutdown=False) as manager:
            assert manager.adopted.sessions == 2
            assert manager.adopted.removed == 0
            assert text_of(await run(attach(manager, "retained", Retention.RETAINED), "x")) == "1"
        assert host.leftovers() == []

    # --- the rest ----------------------------------------------------------------------------------------------------

    async def test_a_pooled_sandbox_serves_a_new_session(self, host: SuiteHost) -> None:
        recorder = Recorder()
        async with host.manager(recorder, pool_size=1) as manager:
            await until(lambda: manager.counts["pool"] == 1)
            assert text_of(await run(attach(manager, "a"), "1 + 1")) == "2"
            assert recorder.starts == ["pool"]
        assert host.leftovers() != []  # a chosen session stays
        await host.clear()

    async def test_session_outlives_that_another_host_asks_its_sandbox(self, host: SuiteHost) -> None:
        async with host.opened() as other, host.manager() as manager:
            at = attach(manager, "a")
            await run(at, "x = 1")
            (handle,) = await other.list_owned()
            running = await started(at, f"{UNTIL_GO}\nx")

            async def ask(upload: str) -> bool:
                # Where a channel takes one host at a time the session's own may come back first.
                with contextlib.suppress(ChannelLost):
                    client = await AgentClient.connect(await other.connect(handle))
                    try:
                        await client.ping()
                        await client.put_file("go", upload, 0, b"", last=True)
                    finally:
                        await client.close()
                    return True
                return False

            asked = False
            for number in range(5):
                asked = asked or await ask(f"u{number}")
            assert asked
            assert text_of(await running) == "1"
            assert text_of(await run(at, "x")) == "1"

    async def test_health_runs_code_and_leaves_nothing(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            await asyncio.gather(*(manager.health() for _ in range(5)))
        assert host.leftovers() == []

    async def test_files_go_in_and_out_through_the_agent(self, host: SuiteHost) -> None:
        async with host.manager() as manager:
            key = request("a").key

            async def pieces() -> AsyncIterator[bytes]:
                yield b"x" * 300_000
                yield b"y" * 300_000

            files = manager.files(key)
            assert await files.put("big.bin", pieces(), 1 << 20) == 600_000
            (info,) = (await files.list()).files
            assert (info.path.rsplit("/", 1)[-1], info.size) == ("big.bin", 600_000)
            content = b"".join([piece async for piece in files.get("big.bin", 1 << 20)])
            assert content == b"x" * 300_000 + b"y" * 300_000
            with pytest.raises(CallRefused):
                await attach(manager, "a").read_file("big.bin", 1000)
            await files.remove("big.bin")
            assert (await files.list()).files == []


async def _nothing() -> AsyncIterator[bytes]:
    yield b""
