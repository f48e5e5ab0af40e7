"""The agent and a real interpreter, driven over the real channel: one defined result, whatever the code does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .driving import BRIEF_S, Agent, Link, children, eventually, text


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    assert agent.close() == ""


@pytest.fixture
def link(agent: Agent) -> Link:
    return agent.claimed()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return True


def test_variables_persist_and_the_last_value_is_shown(link: Link) -> None:
    assert link.run("x = 41")["receipt"]["ending"] == "ok"
    result = link.run("x + 1")
    assert result["value"] == "42"
    assert result["receipt"]["state"] == "kept"
    assert result["receipt"]["sequence"] == 2


def test_a_print_without_newline_is_delivered(link: Link) -> None:
    assert text(link.run("print('tail', end='')")) == "tail"


def test_output_is_streamed_before_the_result(link: Link) -> None:
    _, ident = link.submit("import time\nprint('first', flush=True)\ntime.sleep(30)")
    printed = ""
    while "\n" not in printed:  # a text and its newline may come in two pieces
        printed += link.until("output", ident=ident)["text"]
    assert printed == "first\n"


def test_150000_characters_are_marked_as_cut_and_the_whole_is_in_the_file(link: Link, agent: Agent) -> None:
    result = link.run("for i in range(150): print(str(i).rjust(999, '.'))")
    output = result["output"]
    assert output["head"].startswith("." * 990)
    assert output["tail"].endswith("149\n")
    assert len(output["head"]) + len(output["tail"]) == 20_000
    assert output["cut_characters"] == 130_000
    assert result["receipt"]["bytes_cut"] == 130_000
    assert output["file"] == f"{agent.data}/.outputs/1.txt"
    assert output["file_complete"]
    assert len(Path(output["file"]).read_text()) == 150_000


@pytest.mark.parametrize(
    ("code", "mark"),
    [
        ("'x' * 10_000_000", "\n... [cut: 10,000,000 characters in all] ...\n"),
        ("list(range(100_000))", "\n... [cut: 100,000 items in all] ...\n"),
        ("dict.fromkeys(range(100_000))", "\n... [cut: 100,000 items in all]"),
        ("type('T', (), {'__repr__': lambda self: 'x' * 30_000})()", "\n... [10,000 characters cut] ...\n"),
        ("raise ValueError('x' * 10_000_000)", " characters cut] ...\n"),
    ],
)
def test_a_long_value_or_error_is_cut_once_and_says_how_much_there_is(link: Link, code: str, mark: str) -> None:
    result = link.run(code)
    shown = str(result["value"] or result["error"])
    assert mark in shown
    assert shown.count("\n... ") == 1
    assert len(shown) < 20_100


def test_endless_printing_keeps_memory_flat_and_the_next_call_works(link: Link, agent: Agent) -> None:
    link.run("x = 7")
    before = memory(agent.pid)
    result = link.run("while True: print('flood' * 20)", timeout=2.0)
    assert memory(agent.pid) - before < 32 << 20
    assert result["receipt"]["ending"] == "timed_out"
    assert result["output"]["cut_characters"] > 0
    assert result["receipt"]["bytes_out"] > 1 << 20
    assert link.run("x")["value"] == "7"


def memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise AssertionError


def test_a_hang_past_the_limit_brings_what_was_printed_before(link: Link) -> None:
    result = link.run("import time\nprint('a')\ntime.sleep(300)", timeout=BRIEF_S)
    assert text(result) == "a\n"
    assert result["receipt"]["cause"] == {
        "kind": "deadline",
        "rung": "first_interrupt",
        "signal": None,
        "exit_code": None,
        "limit": BRIEF_S,
    }
    assert link.run("1+1")["value"] == "2"


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("while True: pass", "kept"),
        ("import asyncio\nawait asyncio.Event().wait()", "kept"),
        ("import os\nos.system('sleep 300')", "kept"),
        ("while True:\n try:\n  while True: pass\n except BaseException: pass", None),
        ("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", "lost"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "kept"),
    ],
)
def test_code_that_hangs_is_ended_and_the_fate_of_its_variables_is_true(
    link: Link, code: str, state: str | None
) -> None:
    link.run("x = 41")
    result = link.run(code, timeout=BRIEF_S)
    assert result["receipt"]["ending"] == "timed_out"
    assert state in (None, result["receipt"]["state"])
    state = result["receipt"]["state"]
    after = link.run("x")
    assert (after["value"] == "41") is (state == "kept")
    assert after["receipt"]["epoch"] == (1 if state == "kept" else 2)


def test_a_cell_that_ended_by_itself_as_the_deadline_came_is_not_called_timed_out(tmp_path: Path) -> None:
    """The interrupt of the first rung reaches it only when it is over: its result stands, and what it started lives."""
    agent = Agent(tmp_path, grace_s=30.0)
    link = agent.claimed()
    code = """import signal, subprocess
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
p = subprocess.Popen(['sleep', '300'])
print(p.pid)
while signal.SIGINT not in signal.sigpending(): pass
'its value'"""
    result = link.run(code, timeout=BRIEF_S)
    assert (result["receipt"]["ending"], result["receipt"]["cause"]) == ("ok", None)
    assert result["value"] == "'its value'"
    assert not gone(int(text(result)))
    assert link.run("p.kill()\np.wait()")["receipt"]["ending"] == "ok"
    assert agent.close() == ""


def test_a_cell_that_caught_the_interrupt_is_called_timed_out_whatever_it_says(link: Link) -> None:
    code = "import time\ntry:\n    time.sleep(300)\nexcept KeyboardInterrupt:\n    pass\n5"
    result = link.run(code, timeout=BRIEF_S)
    assert (result["receipt"]["ending"], result["value"]) == ("timed_out", "5")


def test_nothing_of_a_stopped_cell_still_runs_and_older_children_do(link: Link, agent: Agent) -> None:
    older = int(text(link.run("import subprocess, sys\np = subprocess.Popen(['sleep', '300'])\nprint(p.pid)")))
    code = "q = subprocess.Popen(['sleep', '300'], start_new_session=True)\nprint(q.pid)\nwhile True: pass"
    result = link.run("import time\ntime.sleep(0.05)\n" + code, timeout=BRIEF_S)
    assert result["receipt"]["state"] == "kept"
    assert gone(int(text(result)))
    assert not gone(older)


def test_a_killed_interpreter_takes_its_daemons_along(link: Link) -> None:
    code = "import subprocess, os\nq = subprocess.Popen(['setsid', 'sleep', '300'])\nprint(q.pid)\nos._exit(0)"
    result = link.run(code)
    assert result["receipt"]["ending"] == "killed"
    assert gone(int(text(result)))


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os._exit(3)", {"kind": "exit", "exit_code": 3, "signal": None}),
        ("import os; os.kill(os.getpid(), 9)", {"kind": "signal", "signal": 9, "exit_code": None}),
        ("import ctypes; ctypes.string_at(0)", {"kind": "signal", "signal": 11, "exit_code": None}),
    ],
)
def test_a_dead_interpreter_is_named_and_the_next_call_has_a_fresh_one(
    link: Link, code: str, cause: dict[str, object]
) -> None:
    link.run("x = 1")
    receipt = link.run(code)["receipt"]
    assert receipt["ending"] == "killed"
    assert receipt["state"] == "lost"
    assert {key: receipt["cause"][key] for key in cause} == cause
    assert "NameError" in link.run("x")["error"]


def test_running_out_of_memory_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    agent = Agent(tmp_path, limits={"memory_bytes": 256 << 20, "memory_rlimit": True})
    link = agent.claimed()
    result = link.run("x = bytearray(1 << 30)")
    assert result["receipt"]["ending"] == "raised"
    assert result["notes"] == ["The sandbox has 256 MiB of memory."]
    assert agent.close() == ""


def test_input_is_at_its_end_at_once(link: Link) -> None:
    assert "EOFError" in link.run("input()")["error"]


def test_output_after_a_cell_is_labelled_with_the_next_result(link: Link, agent: Agent) -> None:
    link.run(
        "import threading\ngo = threading.Event()\ndef late():\n    go.wait()\n    print('late', flush=True)\n"
        "    open('printed', 'w').close()\nthreading.Thread(target=late).start()"
    )
    link.run("threading.Timer(0.05, go.set).start()")
    assert eventually(lambda: (agent.data / "printed").exists())  # no cell runs meanwhile
    assert link.run("1")["background"]["head"] == "late\n"
    assert link.run("1")["background"] is None


def test_files_that_a_cell_made_or_changed_are_listed(link: Link, agent: Agent) -> None:
    link.run("1")
    result = link.run("import os\nos.mkdir('d')\nopen('d/a.txt', 'w').write('abc')\nopen('.hidden', 'w')")
    assert {"path": f"{agent.data}/d/a.txt", "size": 3} in result["files"]
    assert link.run("2")["files"] == []
    assert link.run("open('d/a.txt', 'a').write('d') and None")["files"] == [
        {"path": f"{agent.data}/d/a.txt", "size": 4}
    ]


def test_a_change_is_listed_with_the_call_that_made_it_though_that_call_killed_its_interpreter(
    link: Link, agent: Agent
) -> None:
    link.run("1")
    result = link.run("import os\nopen('k', 'w').write('x')\nos._exit(3)")
    assert result["files"] == [{"path": f"{agent.data}/k", "size": 1}]
    assert link.run("2")["files"] == []


def test_a_change_between_two_calls_is_neithers(link: Link, agent: Agent) -> None:
    link.run("import subprocess\np = subprocess.Popen(['sh', '-c', 'sleep 0.2; : > late'])")
    late = agent.data / "late"
    assert eventually(late.exists)
    changed = late.stat().st_ctime_ns
    assert eventually(lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) - changed > 20_000_000)  # the kernel's ticks
    assert link.run("1")["files"] == []
    link.run("p.wait()")


def test_one_process_of_the_agent_runs_user_code_and_it_is_not_the_agent(link: Link, agent: Agent) -> None:
    assert link.run("import os; os.getppid()")["value"] == str(agent.pid)
    assert link.run("sorted(os.listdir(f'/proc/{os.getpid()}/fd'))")["receipt"]["ending"] == "ok"


def test_restart_kills_what_runs_and_answers_with_the_new_epoch(link: Link) -> None:
    _, ident = link.submit("import time\ntime.sleep(300)")
    link.until("started", ident=ident)
    link.send("restart")
    answers = {frame["t"]: frame for frame in (link.until("result", "ok"), link.until("result", "ok"))}
    result = answers["result"]
    assert result["receipt"]["cause"]["kind"] == "operator"
    assert result["receipt"]["state"] == "lost"
    assert answers["ok"]["epoch"] == 2


def test_a_call_that_comes_while_a_restart_kills_runs_in_the_next_interpreter(link: Link, agent: Agent) -> None:
    link.run("x = 1")
    for number in range(2, 12):
        link.send("restart")
        result = link.run("'x' in globals()")
        assert (result["receipt"]["ending"], result["value"], result["receipt"]["epoch"]) == ("ok", "False", number)


ENDED_BY_THE_LADDER = """
import os, signal, subprocess, time
own = subprocess.Popen(['sh', '-c', 'exit 3'])
while os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None: pass
for _ in range(5):
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        open(f'ready{os.getpid()}', 'w').close()
        time.sleep(300)
while len([name for name in os.listdir() if name.startswith('ready')]) < 5: pass
try:
    open('waiting', 'w').close()
    time.sleep(300)
except KeyboardInterrupt:
    time.sleep(300)
"""
ZOMBIES = """
found = []
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        stat = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()
    except OSError:
        continue
    if stat[0] == 'Z' and int(stat[1]) == os.getpid():
        found.append(int(pid))
[pid for pid in found if pid != own.pid], own.wait()
"""


def test_children_that_an_interrupt_ended_are_reaped_and_what_ended_before_is_the_codes_to_ask(tmp_path: Path) -> None:
    agent = Agent(tmp_path, grace_s=2.0)
    link = agent.claimed()
    attempt, ident = link.submit(ENDED_BY_THE_LADDER, digest="d")
    assert eventually((agent.data / "waiting").exists)
    link.send("cancel", attempt=attempt, why="operator")
    result = link.until("result", ident=ident)
    assert (result["receipt"]["ending"], result["receipt"]["state"]) == ("interrupted", "kept"), result
    assert result["receipt"]["cause"]["rung"] == "second_interrupt"
    assert link.run(ZOMBIES, digest="d")["value"] == "([], 3)"
    assert agent.close() == ""


def test_an_interpreter_that_cannot_start_is_said_so_with_its_words(tmp_path: Path) -> None:
    agent = Agent(tmp_path, interpreter=["/bin/sh", "-c", "echo no python here; exit 5"])
    link = agent.claimed()
    result = link.run("1")
    assert result["receipt"]["ending"] == "never_started"
    assert "exit code 5" in result["notes"][0]
    assert "no python here" in result["notes"][0]
    assert agent.close() == ""


def test_killed_children_are_reaped(link: Link, agent: Agent) -> None:
    link.run("import os\nfor _ in range(20):\n    if os.fork() == 0:\n        os.setsid(); os._exit(0)")
    link.run("import os; os._exit(0)")
    link.run("1")
    assert eventually(lambda: not any(gone(pid) for pid in children(agent.pid)))


def test_a_disk_that_fills_ends_what_fills_it_and_the_next_call_can_delete(tmp_path: Path) -> None:
    agent = Agent(tmp_path, limits={"disk_bytes": 20 << 20})
    link = agent.claimed()
    link.run("x = 1")
    code = "import time\nfor i in range(60):\n    open(f'f{i}', 'wb').write(bytes(1 << 20))\ntime.sleep(300)"
    result = link.run(code, timeout=60.0)
    assert result["receipt"]["ending"] == "interrupted"
    assert "the limit is 20 MiB" in result["notes"][0]
    assert link.run("import glob, os\nfor name in glob.glob('f*'): os.remove(name)\nx")["value"] == "1"
    assert agent.close() == ""


def test_one_file_cannot_outgrow_the_limit(tmp_path: Path) -> None:
    agent = Agent(tmp_path, limits={"disk_bytes": 1 << 20})
    result = agent.claimed().run("open('big', 'wb', buffering=0).write(bytes(2 << 20)) + open('big', 'ab').write(b'x')")
    assert result["receipt"]["ending"] in ("ok", "raised")
    assert os.stat(agent.data / "big").st_size <= 1 << 20
    assert agent.close() == ""


def test_the_agent_ends_on_sigterm_with_everything_it_started(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    pid = int(agent.claimed().run("import os; os.getpid()")["value"])
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(10) == 0
    assert eventually(lambda: gone(pid))
    assert agent.close() == ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import os, threading\nthreading.Timer(0.1, os._exit, [3]).start()",
            "died after the previous call (exit code 3)",
        ),
        ("import os, threading\nthreading.Timer(0.1, os.kill, [os.getpid(), 9]).start()", "(signal 9)"),
        ("import os, threading\nthreading.Timer(0.1, os.closerange, [3, 4096]).start()", "control channel"),
    ],
)
def test_a_death_between_two_calls_is_told_by_the_next_once(link: Link, agent: Agent, code: str, said: str) -> None:
    pid = int(link.run("x = 41; import os; os.getpid()")["value"])
    link.run(f"open('kept', 'w').close()\n{code}")
    assert eventually(lambda: gone(pid))
    assert link.shell("true")["state_lost_before"] is None  # of a command no variable is asked
    result = link.run("import os\n'x' in globals(), os.path.exists('kept')")
    assert result["value"] == "(False, True)"
    assert said in result["state_lost_before"]
    assert "files are kept" in result["state_lost_before"]
    assert link.run("1")["state_lost_before"] is None


def test_a_call_that_comes_as_the_interpreter_dies_runs_in_the_next_one(link: Link, agent: Agent) -> None:
    pid = int(link.run("import os; os.getpid()")["value"])
    os.kill(agent.pid, signal.SIGSTOP)  # so that it hears of both at once
    try:
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: gone(pid))
        _, ident = link.submit("import os; os.getpid()")
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    result = link.until("result", ident=ident)
    assert result["receipt"]["ending"] == "ok" and int(result["value"]) != pid
    assert "died after the previous call (signal 9)" in result["state_lost_before"]


def test_a_call_that_a_dying_interpreter_never_took_says_that_it_did_not_run(link: Link) -> None:
    pid = int(link.run("import os; os.getpid()")["value"])
    os.kill(pid, signal.SIGSTOP)
    _, ident = link.submit("open('ran', 'w').close()")
    link.until("started", ident=ident)
    os.kill(pid, signal.SIGKILL)
    result = link.until("result", ident=ident)
    assert (result["receipt"]["ending"], result["receipt"]["state"]) == ("never_started", "lost")
    assert "(signal 9) before it took the code of this call, which did not run" in " ".join(result["notes"])
    assert link.run("import os; os.path.exists('ran')")["value"] == "False"


def test_an_interpreter_that_dies_unused_hides_no_earlier_loss_and_is_none_itself(link: Link, agent: Agent) -> None:
    def living() -> list[int]:
        return [pid for pid in children(agent.pid) if not gone(pid)]

    first = int(link.run("import os; os.getpid()")["value"])
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: gone(first) and len(living()) == 1)
    second = living()[0]
    os.kill(second, signal.SIGKILL)
    assert eventually(lambda: gone(second))
    assert "signal 9" in link.run("1")["state_lost_before"]
    assert link.run("1")["state_lost_before"] is None


def test_a_restart_is_the_operators_to_tell(link: Link) -> None:
    link.run("x = 1")
    assert link.ask("restart")["t"] == "ok"
    assert link.run("1")["state_lost_before"] is None
