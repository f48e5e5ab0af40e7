"""What running code is like, on every backend: whatever the code does, one defined result, and the next call works.

A test module has `class TestExecution(ExecutionSuite)` and a fixture `host` that gives a `SuiteHost`. Where a backend
does not give a guarantee it says so in `differences`, and the test asserts what is the case there.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator

import pytest

from sandboxes.agent import wire
from sandboxes.errors import CallRefused
from sandboxes.events import Printed, Started
from sandboxes.manager import Attachment, SessionManager
from sandboxes.spec import CauseKind, Ending, Execution, Outcome, PythonCall, Rung, State
from sandboxes.testing.backend_suite import BEGUN, BRIEF_S, ENDLESS, SOON_S, STUBBORN, begun, run, started
from sandboxes.testing.host import SuiteHost, attach, text_of

# Every one of these must end within the ladder's steps after its deadline.
HANGS = {
    "loop": (ENDLESS, State.KEPT),
    "sleep": ("import time\ntime.sleep(1e9)", State.KEPT),
    "await": ("import asyncio\nawait asyncio.Event().wait()", State.KEPT),
    "lock": ("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", State.KEPT),
    "ignored interrupt": (
        "while True:\n    try:\n        while True:\n            pass\n    except KeyboardInterrupt:\n        pass",
        State.LOST,
    ),
    "ignored cancellation": (
        "import asyncio\nwhile True:\n    try:\n        await asyncio.sleep(9)\n    except BaseException: pass",
        State.KEPT,  # the second interrupt is raised in the event loop itself
    ),
    "SIG_IGN": ("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass", State.LOST),
    "blocked signals": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True:\n    pass",
        State.LOST,
    ),
    # One call that never comes back to Python between instructions.
    "C code": (
        "import ctypes\nctypes.CDLL(None).sleep.argtypes\n[ctypes.CDLL(None).sleep(60) for _ in range(9)]",
        None,
    ),
    "C computing": ("sum(range(10 ** 14))", State.LOST),
    "child": ("import subprocess\nsubprocess.run(['sleep', '1000'])", State.KEPT),
    "shell that ignores": ("import os\nos.system('trap \"\" INT TERM; while :; do sleep 1; done')", None),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass", State.KEPT),
}

DEATHS = {
    "segfault": ("import ctypes\nctypes.string_at(0)", CauseKind.SIGNAL, 11),
    "exit": ("import os\nos._exit(3)", CauseKind.EXIT, 3),
    "kill -9": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", CauseKind.SIGNAL, 9),
    "abort": ("import os\nos.abort()", CauseKind.SIGNAL, 6),
    "kill 0": ("import os, signal\nos.kill(0, signal.SIGTERM)", CauseKind.SIGNAL, 15),
}

MEMORY = "hog = []\nwhile True:\n    hog.append(b'x' * (1 << 20))"

# (code, what the text has)
SAID = {
    "input": ("input('name? ')", "EOFError"),
    "no newline": ("print('tail', end='')", "tail"),
    "stderr": ("import sys\nprint('warned', file=sys.stderr)", "warned"),
    "os.system": ("import os\nos.system('echo from the shell')\nNone", "from the shell"),
    "subprocess": ("import subprocess\nsubprocess.run('echo from a child; echo and its stderr >&2', shell=True)\nNone",
                   "from a child\nand its stderr"),
    "write(2)": ("import os\nos.write(1, b'raw \\xff bytes')\nNone", "raw \ufffd bytes"),
    "sys.exit": ("import sys\nprint('before')\nsys.exit(3)", "before"),
    "raise SystemExit": ("raise SystemExit", ""),
    "deep recursion": ("def f(): return f()\nf()", "RecursionError"),
    "syntax error": ("def (", "SyntaxError"),
    "null byte": ("x = '\0'", "null byte"),
    "closed stdout": ("import sys\nsys.stdout.close()", ""),
    "closed descriptors": ("import os\nfor fd in range(3): os.close(fd)", ""),
    "print redefined": ("import builtins\nbuiltins.print = None", ""),
    "fork": ("import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait()", "child"),
    "fork without exit": ("import os\nos.fork()\n1", ""),
    "thread that raises": ("import threading\nt = threading.Thread(target=lambda: 1/0)\nt.start()\nt.join()",
                           "ZeroDivisionError"),
    "multiprocessing": (
        "import multiprocessing\ndef double(n): return 2 * n\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(double, [1, 2]))",
        "[2, 4]",
    ),
    "top-level await": ("import asyncio\nawait asyncio.sleep(0.01, 'slept')", "slept"),
    "surrogates": ("'\\ud800'", "ud800"),
    "SIGINT of itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(5)",
                         "KeyboardInterrupt"),
}  # fmt: skip


class ExecutionSuite:
    """Each test has a session of its own; `manager` and `at` are made from the module's `host`."""

    @pytest.fixture
    async def manager(self, host: SuiteHost) -> AsyncIterator[SessionManager]:
        async with host.manager() as manager:
            yield manager

    @pytest.fixture
    async def at(self, manager: SessionManager) -> Attachment:
        return attach(manager, "a")

    # --- text --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", SAID)
    async def test_odd_code_has_a_defined_result_and_the_next_call_works(self, at: Attachment, name: str) -> None:
        code, said = SAID[name]
        await run(at, "x = 41")
        outcome = await run(at, code)
        assert outcome.receipt.ending in (Ending.OK, Ending.RAISED), outcome
        assert said in text_of(outcome)
        after = await run(at, "import sys\nprint(x + 1, file=sys.__stdout__, flush=True)")
        assert text_of(after) == "42\n", after

    async def test_150000_characters_are_marked_as_cut_and_all_are_in_the_file(self, at: Attachment) -> None:
        outcome = await run(at, "print('0123456789' * 15_000, end='')")
        output = outcome.output
        assert len(output.head) + len(output.tail) == 20_000
        assert output.cut_characters == 130_000
        assert output.file == f"/mnt/data/.outputs/{outcome.receipt.sequence}.txt"
        assert output.file_complete
        check = f"text = open({output.file!r}).read(); text == '0123456789' * 15_000"
        assert text_of(await run(at, check)) == "True"

    async def test_four_thousand_lines_of_two_streams_and_of_children_are_in_order(self, at: Attachment) -> None:
        code = (
            "import os, sys\nfor n in range(1000):\n"
            "    print(4 * n)\n    print(4 * n + 1, file=sys.stderr)\n    os.write(1, b'%d\\n' % (4 * n + 2))\n"
            "    sys.stderr.write(f'{4 * n + 3}\\n')\nprint('sub', flush=True)\nos.system('echo child')\nprint('end')"
        )
        lines = text_of(await run(at, code)).split("\n")
        assert lines == [*(str(n) for n in range(4000)), "sub", "child", "end", ""]

    async def test_endless_printing_ends_at_its_limit_with_head_tail_and_count(self, at: Attachment) -> None:
        outcome = await run(at, "n = 0\nwhile True:\n    n += 1\n    print('line', n)", timeout_s=2)
        assert outcome.receipt.ending is Ending.TIMED_OUT
        assert outcome.receipt.state is State.KEPT
        assert outcome.output.head.startswith("line 1\nline 2\n")
        assert outcome.output.cut_characters > 10_000
        kept = len(outcome.output.head) + len(outcome.output.tail)
        assert outcome.receipt.bytes_out == kept + outcome.output.cut_characters
        last = max(int(number) for number in re.findall(r"^line (\d+)\n", outcome.output.tail, re.M))
        began = time.monotonic()
        assert int(text_of(await run(at, "n"))) >= last
        assert time.monotonic() - began < SOON_S

    async def test_partial_output_is_streamed_and_comes_with_the_time_out(self, at: Attachment) -> None:
        seen: list[str] = []

        def on_event(event: object) -> None:
            if isinstance(event, Printed):
                seen.append(event.text)

        call = PythonCall("print('a', end='')\nimport time\ntime.sleep(1e9)")
        outcome = await at.run(Execution(call, timeout_s=BRIEF_S), on_event)
        assert (outcome.output.head, outcome.receipt.ending) == ("a", Ending.TIMED_OUT)
        assert "".join(seen) == "a"

    async def test_what_is_printed_after_a_cell_ended_comes_with_the_next_result_and_apart(
        self, manager: SessionManager, at: Attachment
    ) -> None:
        code = (
            "import threading\ngo = threading.Event()\n"
            "def late():\n    go.wait()\n    print('from the thread', flush=True)\n    open('said', 'w').close()\n"
            "threading.Thread(target=late).start()\nprint('now')\nthreading.Timer(0.3, go.set).start()"
        )
        assert text_of(await run(at, code)) == "now\n"
        await _file(manager, at, "said")  # no cell runs when it prints
        outcome = await run(at, "'next'")
        assert text_of(outcome) == "'next'"
        assert outcome.background is not None
        assert outcome.background.head == "from the thread\n"
        assert (await run(at, "1")).background is None

    async def test_a_noisy_child_that_outlives_its_cell_is_heard_later_and_ends_with_its_interpreter(
        self, manager: SessionManager, at: Attachment
    ) -> None:
        noisy = "while :; do echo noise; touch said; sleep 0.1; done"
        await run(at, f"import subprocess, time\nchild = subprocess.Popen(['sh', '-c', 'sleep 0.5; {noisy}'])")
        await _file(manager, at, "said")
        outcome = await run(at, "child.poll()")
        assert outcome.background is not None
        assert outcome.background.head.startswith("noise\n")
        await run(at, "import os\nos._exit(1)")
        assert text_of(await run(at, PROCESSES)) == "[]"

    # --- the ladder --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", HANGS)
    async def test_what_hangs_is_ended_and_the_fate_of_its_variables_is_true(self, at: Attachment, name: str) -> None:
        code, expected = HANGS[name]
        # What takes long to import on a busy machine is there before the time counts.
        await run(at, "import asyncio, ctypes, subprocess\nx = 7\nopen('/mnt/data/kept', 'w').write('k')")
        began = time.monotonic()
        outcome = await run(at, f"print('begun')\n{code}", timeout_s=BRIEF_S)
        assert time.monotonic() - began < SOON_S
        assert outcome.receipt.ending is Ending.TIMED_OUT
        assert outcome.receipt.started_at is not None
        assert outcome.output.head.startswith("begun\n")
        assert outcome.receipt.cause is not None
        assert outcome.receipt.cause.kind is CauseKind.DEADLINE
        assert (outcome.receipt.cause.rung is Rung.KILL) == (outcome.receipt.state is State.LOST)
        if expected is not None:
            assert outcome.receipt.state is expected
        after = await run(at, "x")
        if outcome.receipt.state is State.KEPT:
            assert text_of(after) == "7"
        else:
            assert "NameError" in text_of(after)
            assert after.receipt.epoch == outcome.receipt.epoch + 1
        assert text_of(await run(at, "open('/mnt/data/kept').read()")) == "'k'"

    async def test_nothing_of_an_ended_cell_still_runs(self, at: Attachment) -> None:
        code = (
            "import os, subprocess, threading\n"
            "subprocess.Popen(['sleep', '1001'])\nsubprocess.Popen(['sleep', '1002'], start_new_session=True)\n"
            "os.system('(sleep 1003 & sleep 1004 &) ')\nos.fork()\nwhile True: pass"
        )
        outcome = await run(at, code, timeout_s=1)
        assert outcome.receipt.ending is Ending.TIMED_OUT
        assert text_of(await run(at, PROCESSES)) == "[]"

    async def test_a_cancelled_call_climbs_the_same_ladder(self, at: Attachment) -> None:
        await run(at, "x = 7")
        for code, after in ((BEGUN, "7"), (STUBBORN, "NameError")):
            call = await begun(at, code)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert after in text_of(await run(at, "x"))

    async def test_a_time_out_says_that_the_code_ran_and_a_refused_call_that_it_did_not(self, at: Attachment) -> None:
        outcome = await run(at, "import time\ntime.sleep(60)", timeout_s=0.3)
        assert outcome.receipt.started_at is not None
        assert outcome.receipt.started_at >= outcome.receipt.queued_at - 1
        with pytest.raises(CallRefused):
            await run(at, "#" * (wire.MAX_FRAME_TO_AGENT + 1))

    # --- deaths ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", DEATHS)
    async def test_a_death_is_named_files_are_kept_and_the_next_call_works(self, at: Attachment, name: str) -> None:
        code, kind, number = DEATHS[name]
        await run(at, "x = 7\nopen('/mnt/data/kept', 'w').write('k')")
        outcome = await run(at, f"print('begun', flush=True)\n{code}")
        cause = outcome.receipt.cause
        assert outcome.receipt.ending is Ending.KILLED
        assert outcome.receipt.state is State.LOST
        assert cause is not None
        assert (cause.kind, cause.exit_code if kind is CauseKind.EXIT else cause.signal) == (kind, number)
        assert outcome.output.head.startswith("begun\n")
        after = await run(at, "open('/mnt/data/kept').read()")
        assert text_of(after) == "'k'"
        assert after.receipt.epoch == outcome.receipt.epoch + 1
        assert "NameError" in text_of(await run(at, "x"))

    async def test_running_out_of_memory_is_named_with_the_limit(
        self, host: SuiteHost, manager: SessionManager, at: Attachment
    ) -> None:
        await run(at, "open('/mnt/data/kept', 'w').write('k')")
        outcome = await run(at, MEMORY, timeout_s=60)
        if outcome.receipt.ending is Ending.RAISED:  # a limit of the process: Python is told, and raises
            assert "MemoryError" in text_of(outcome)
            assert any("of memory" in note for note in outcome.notes)
        else:
            lost = "memory-limit-ends-sandbox" in manager._backend.differences
            assert outcome.receipt.ending is (Ending.LOST if lost else Ending.KILLED)
            assert outcome.receipt.cause is not None
            assert outcome.receipt.cause.kind is CauseKind.OUT_OF_MEMORY
            assert outcome.receipt.cause.limit == host.spec.limits.memory_bytes
        assert text_of(await run(at, "open('/mnt/data/kept').read()")) == "'k'"

    # --- files -------------------------------------------------------------------------------------------------------

    async def test_files_of_an_execution_are_listed_with_it(self, at: Attachment) -> None:
        await run(at, "open('old.txt', 'w').write('1')")
        code = "import os\nos.makedirs('d/e')\nopen('d/e/new.txt', 'w').write('12345')\nopen('old.txt', 'a').write('2')"
        outcome = await run(at, code)
        files = {file.path: file.size for file in outcome.files}
        assert files == {"/mnt/data/d/e/new.txt": 5, "/mnt/data/old.txt": 2}
        assert (await run(at, "1")).files == ()

    async def test_a_background_process_that_uses_all_cpu_does_not_delay_the_agent(
        self, manager: SessionManager, at: Attachment
    ) -> None:
        hog = "subprocess.Popen([sys.executable, '-c', 'while 1: pass'])"
        hogs = f"import subprocess, sys\nhogs = [{hog} for _ in '12345']"
        await run(at, hogs)
        call = await started(at, ENDLESS, attempt="busy")
        began = time.monotonic()
        assert await manager.interrupt(at.key)
        outcome = await asyncio.wait_for(call, SOON_S)
        assert outcome.receipt.ending is Ending.INTERRUPTED
        assert time.monotonic() - began < 10
        await run(at, "[hog.kill() for hog in hogs]")

    async def test_events_come_in_order_and_only_of_the_own_call(self, at: Attachment) -> None:
        seen: list[object] = []
        first = asyncio.create_task(at.run(Execution(PythonCall("print('one')"), attempt_id="one"), seen.append))
        second = asyncio.create_task(run(at, "print('two')", attempt="two"))
        await asyncio.gather(first, second)
        assert {event.attempt_id for event in seen if isinstance(event, Started | Printed)} == {"one"}


# Commands of every process of user code but the interpreter that asks.
PROCESSES = (
    "import os\nfound = []\nfor pid in os.listdir('/proc'):\n"
    "    if pid.isdigit() and int(pid) not in (1, os.getpid()):\n"
    "        try:\n            line = open(f'/proc/{pid}/cmdline').read()\n"
    "            state = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0]\n"
    "        except OSError:\n            continue\n"
    "        if os.stat(f'/proc/{pid}').st_uid == os.getuid() and 'toolhost_agent' not in line and state not in 'ZX':\n"
    "            found.append(line)\nfound"
)


async def _file(manager: SessionManager, at: Attachment, name: str) -> None:
    """Waits, without running anything, until code has made a file."""
    async with asyncio.timeout(SOON_S):
        files = manager.files(at.key)
        while f"/mnt/data/{name}" not in [info.path for info in (await files.list()).files]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def said(outcome: Outcome) -> str:
    """Its text and the agent's notes."""
    return "\n".join([text_of(outcome), *outcome.notes])
