"""SIGINT at any moment: the cell ends or goes on as defined, variables stay, the next cell works."""

from __future__ import annotations

import random
import signal
import threading
from typing import Any

import pytest

from .interpreter_process import Died, InterpreterProcess


def interrupted(python: InterpreterProcess, code: str, times: int = 1) -> dict[str, Any]:
    """Runs `code`, which prints GO when it is where it is to be interrupted."""
    number = python.send(code)
    text = python.output_until("GO")
    for _ in range(times):
        python.interrupt()
    answer = python.result(number)
    return {**answer, "output": text + answer["output"]}


def check_state_kept(python: InterpreterProcess) -> None:
    answer = python.run("x + 1")
    assert (answer["outcome"], answer["value"]) == ("ok", "42")


@pytest.mark.parametrize(
    "code",
    [
        "print('GO')\nwhile True: pass",
        "import time\nprint('GO')\ntime.sleep(1e9)",
        "import threading\nprint('GO')\nthreading.Event().wait()",
        "import asyncio\nprint('GO')\nawait asyncio.Event().wait()",
        "import asyncio\nprint('GO')\nwhile True: await asyncio.sleep(0)",
        "import asyncio\nawait asyncio.sleep(0)\nprint('GO')\nwhile True: pass",
        "import asyncio\nasync def f():\n    print('GO')\n    await asyncio.sleep(1e9)\nasyncio.run(f())",
        "import asyncio\nasync def f():\n    print('GO')\n    while True: pass\nt = asyncio.create_task(f())\n"
        "await asyncio.sleep(1e9)",
        "import subprocess\nsubprocess.run(['sh', '-c', 'echo GO; sleep 1000'])",
    ],
    ids=["loop", "sleep", "lock", "await", "await-loop", "loop-after-await", "asyncio-run", "task-hogs", "subprocess"],
)
def test_interrupt_ends_the_cell_and_keeps_variables(python: InterpreterProcess, code: str) -> None:
    answer = interrupted(python, code)
    assert answer["outcome"] == "interrupted"
    assert answer["output"].startswith("GO")
    assert answer["error"].endswith("KeyboardInterrupt")
    assert "<cell 2>" in answer["error"]
    assert "sandboxes" not in answer["error"]
    check_state_kept(python)


# What a task does last, when it waits, is asyncio's own: the task is still the current one, and no code of it runs.
NOTING_DOWN = """import asyncio, os
loop = asyncio.get_running_loop()
note_down = loop.call_soon
def note_down_slowly(*args, **options):
    loop.call_soon = note_down
    print('GO')
    while not os.path.exists('interrupted'): pass
    return note_down(*args, **options)
"""


def interrupt_the_noting_down(python: InterpreterProcess) -> None:
    python.interrupt()
    (python.directory / "interrupted").touch()


def test_interrupt_in_asyncios_own_code_comes_to_the_cell_where_it_waits(python: InterpreterProcess) -> None:
    code = NOTING_DOWN + (
        "loop.call_soon = note_down_slowly\ntry:\n    while True: await asyncio.sleep(0)\n"
        "finally:\n    await asyncio.sleep(0)\n    print('in order')"
    )
    number = python.send(code)
    python.output_until("GO\n")
    interrupt_the_noting_down(python)
    answer = python.result(number)
    assert (answer["outcome"], answer["output"]) == ("interrupted", "in order\n")
    assert "line 11, in <module>\n    while True: await asyncio.sleep(0)\n" in answer["error"]
    check_state_kept(python)


def test_interrupt_in_asyncios_own_code_loses_no_background_task(python: InterpreterProcess) -> None:
    code = NOTING_DOWN + (
        "async def work():\n    await asyncio.sleep(0.05)\n    loop.call_soon = note_down_slowly\n"
        "    await asyncio.sleep(0)\n    print('done')\ntask = asyncio.create_task(work())\n0"
    )
    assert python.run(code)["outcome"] == "ok"
    python.output_until("GO\n")
    number = python.send("await task\nx + 1")
    interrupt_the_noting_down(python)
    answer = python.result(number)
    assert (answer["outcome"], answer["value"], answer["output"]) == ("ok", "42", "done\n")


def test_interrupted_await_shows_where_it_was_waiting(python: InterpreterProcess) -> None:
    code = (
        "import asyncio\nasync def deep():\n"
        "    asyncio.get_running_loop().call_later(0.05, print, 'GO')\n    await asyncio.Event().wait()\nawait deep()"
    )
    error = interrupted(python, code)["error"]
    assert "line 5, in <module>\n    await deep()" in error
    assert "line 4, in deep" in error
    assert "base_events" not in error


def test_task_that_refuses_its_cancellation_ends_at_the_second_interrupt(python: InterpreterProcess) -> None:
    code = """import asyncio
asyncio.get_running_loop().call_later(0.05, print, 'GO')
while True:
    try:
        await asyncio.sleep(1e9)
    except asyncio.CancelledError:
        print('REFUSED')"""
    number = python.send(code)
    python.output_until("GO")
    python.interrupt()
    python.output_until("REFUSED")
    python.interrupt()
    assert python.result(number)["outcome"] == "interrupted"
    check_state_kept(python)


def test_cell_that_swallows_the_interrupt_goes_on_and_its_own_result_stands(python: InterpreterProcess) -> None:
    code = "import time\ntry:\n    print('GO')\n    time.sleep(1e9)\nexcept KeyboardInterrupt:\n    print('caught')\n5"
    answer = interrupted(python, code)
    assert (answer["outcome"], answer["value"], answer["untouched"]) == ("ok", "5", False)
    assert "caught" in answer["output"]


def test_interrupt_between_cells_is_ignored(python: InterpreterProcess) -> None:
    for _ in range(5):
        python.interrupt()
    check_state_kept(python)
    python.interrupt()
    check_state_kept(python)


@pytest.mark.parametrize(
    "code",
    [
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])",
        "import signal; signal.signal(signal.SIGINT, lambda *a: None)",
    ],
)
def test_sigint_works_again_in_the_cell_after_one_that_took_it(python: InterpreterProcess, code: str) -> None:
    assert python.run(code)["outcome"] == "ok"
    assert interrupted(python, "print('GO')\nwhile True: pass")["outcome"] == "interrupted"
    check_state_kept(python)


def test_endless_repr_is_interrupted(python: InterpreterProcess) -> None:
    code = "class Slow:\n    def __repr__(self):\n        print('GO')\n        while True: pass\nSlow()"
    assert interrupted(python, code)["outcome"] == "interrupted"
    check_state_kept(python)


def test_endless_text_of_an_exception_is_interrupted(python: InterpreterProcess) -> None:
    code = "class Slow(Exception):\n    def __str__(self):\n        print('GO')\n        while True: pass\nraise Slow()"
    answer = interrupted(python, code, times=1)
    assert answer["outcome"] in ("raised", "interrupted")
    check_state_kept(python)


def test_output_before_the_interrupt_is_kept_without_a_newline(python: InterpreterProcess) -> None:
    answer = interrupted(python, "print('a', end='')\nprint('GO', end='')\nwhile True: pass")
    assert answer["output"] == "aGO"


def test_background_task_that_hogs_between_cells_gives_way_to_the_next_cell(python: InterpreterProcess) -> None:
    code = """import asyncio
async def hog():
    await asyncio.sleep(0.01)
    print('GO')
    while True: pass
task = asyncio.create_task(hog())
0"""
    assert python.run(code)["outcome"] == "ok"
    python.output_until("GO")
    number = python.send("x + 1")
    python.interrupt()
    answer = python.result(number)
    assert (answer["outcome"], answer["value"]) == ("ok", "42")


def test_alarm_without_a_handler_kills_the_process_by_that_signal(python: InterpreterProcess) -> None:
    with pytest.raises(Died) as died:
        python.run("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass")
    assert died.value.args[0] == -signal.SIGALRM


def test_alarm_handler_that_raises_ends_its_cell(python: InterpreterProcess) -> None:
    code = """import signal
def on_alarm(number, frame):
    raise TimeoutError('too slow')
signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, 0.01)
while True: pass"""
    answer = python.run(code)
    assert answer["outcome"] == "raised"
    assert answer["error"].endswith("TimeoutError: too slow")
    check_state_kept(python)


def test_alarm_handler_that_raises_between_cells_is_shown_and_the_next_cell_works(python: InterpreterProcess) -> None:
    code = """import signal
def on_alarm(number, frame):
    raise TimeoutError('too late')
signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, 0.05)"""
    assert python.run(code)["outcome"] == "ok"
    assert "TimeoutError: too late" in python.output_until("too late")
    check_state_kept(python)


def test_interrupts_at_any_moment_leave_every_cell_answered(python: InterpreterProcess) -> None:
    cells = [
        "x",
        "sum(range(2000))",
        "import asyncio\nawait asyncio.sleep(0.001)",
        "1 / 0",
        "print('text')",
        "def f(n): return f(n)\nf(1)",
        "class R:\n    def __repr__(self): return 'r' * 50000\nR()",
    ]
    chance = random.Random(5)
    stop = threading.Event()

    def interrupt() -> None:
        while not stop.wait(chance.random() * 0.002):
            python.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        outcomes = {python.run(chance.choice(cells))["outcome"] for _ in range(400)}
    finally:
        stop.set()
        thread.join()
    assert outcomes <= {"ok", "raised", "interrupted"}
    assert "interrupted" in outcomes
    check_state_kept(python)


def test_cell_blocked_on_a_pipe_that_nobody_reads_is_interrupted(python: InterpreterProcess) -> None:
    number = python.send("while True: print('x' * 1000)")
    python.wait_until_output_stalls()
    python.interrupt()
    answer = python.frame_alone()
    assert (answer["n"], answer["outcome"]) == (number, "interrupted")
    python.output()
    check_state_kept(python)


@pytest.mark.parametrize(
    "code",
    [
        "1",
        "1 / 0",
        "import asyncio\nawait asyncio.sleep(0)\n1",
        "import signal\nsignal.getsignal(signal.SIGINT) and None",
    ],
)
def test_cell_that_no_interrupt_reached_says_so_also_after_one_that_was_interrupted(
    python: InterpreterProcess, code: str
) -> None:
    assert interrupted(python, "print('GO')\nwhile True: pass")["untouched"] is False
    python.interrupt()
    assert python.run(code)["untouched"] is True


def test_interrupt_that_the_cells_own_handler_took_may_have_ended_it(python: InterpreterProcess) -> None:
    code = """import signal, time
gone = []
signal.signal(signal.SIGINT, lambda *a: gone.append(1))
print('GO')
while not gone: time.sleep(0.01)
len(gone)"""
    answer = interrupted(python, code)
    assert (answer["value"], answer["untouched"]) == ("1", False)
    assert python.run("1")["untouched"] is True


def test_interrupt_while_the_figures_are_written_leaves_the_result_and_says_what_may_be_missing(
    python: InterpreterProcess,
) -> None:
    code = """import sys
class Slow:
    closed = False
    def __getattr__(self, name): return getattr(sys.__stdout__, name)
    def flush(self):
        import time
        sys.__stdout__.write('GO')
        sys.__stdout__.flush()
        time.sleep(1e9)
sys.stdout = Slow()
7"""
    answer = interrupted(python, code)
    assert (answer["outcome"], answer["value"], answer["untouched"]) == ("ok", "7", True)
    assert "some may be missing" in answer["note"]
    check_state_kept(python)
