"""Commands and named shells: exit codes, what stays, and how they are ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .driving import BRIEF_S, Agent, Link, text
from .test_agent_python import gone


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    assert agent.close() == ""


@pytest.fixture
def link(agent: Agent) -> Link:
    return agent.claimed()


def test_a_list_is_executed_without_a_shell(link: Link) -> None:
    result = link.shell(["printf", "%s|", "$HOME", "a b", "*"])
    assert (text(result), result["exit_code"]) == ("$HOME|a b|*|", 0)


def test_a_text_is_given_to_a_shell_in_its_directory_with_its_variables(link: Link) -> None:
    result = link.shell('echo "$X"; pwd; exit 3', env={"X": "a 'b\" $c"}, workdir="/usr")
    assert text(result) == "a 'b\" $c\n/usr\n"
    assert (result["exit_code"], result["receipt"]["ending"]) == (3, "raised")


@pytest.mark.parametrize(
    ("cmd", "code", "words"),
    [
        (["no-such-program"], 127, "No such file"),
        (["/etc/passwd"], 126, "Permission denied"),
        ("kill -9 $$", 137, ""),
    ],
)
def test_what_cannot_run_or_is_killed_has_the_usual_exit_code(
    link: Link, cmd: list[str] | str, code: int, words: str
) -> None:
    result = link.shell(cmd)
    assert result["exit_code"] == code
    assert words in text(result)


def test_a_named_shell_keeps_directory_variables_functions_and_jobs(link: Link) -> None:
    link.shell("cd /usr; x=5; f() { echo f$1; }; sleep 300 & declare -a list=(1 2)", shell="a")
    assert text(link.shell("pwd; echo $x; f 1; echo ${list[1]}", shell="a")) == "/usr\n5\nf1\n2\n"
    assert "Running" in text(link.shell("jobs", shell="a"))
    assert text(link.shell("echo .$x", shell="b")) == ".\n"


@pytest.mark.parametrize("cmd", ["break", "return 3", "if then", "cat", "exec 3>&-; exec 4>&-", "echo 0 >&4", "'"])
def test_no_command_wedges_its_shell(link: Link, cmd: str) -> None:
    link.shell("x=5", shell="a")
    assert link.shell(cmd, shell="a", timeout=5.0)["receipt"]["ending"] in ("ok", "raised")
    assert text(link.shell("echo $x", shell="a")) == "5\n"


def test_exit_ends_a_shell_and_the_next_call_opens_a_new_one(link: Link) -> None:
    link.shell("x=5", shell="a")
    result = link.shell("exit 4", shell="a")
    assert result["exit_code"] == 4
    assert "next call opens a new one" in result["notes"][0]
    assert text(link.shell("echo .$x", shell="a")) == ".\n"


@pytest.mark.parametrize("cmd", ["sleep 300", "while true; do sleep 300; done", "while :; do :; done", "(sleep 300)"])
def test_a_time_out_interrupts_what_runs_and_the_shell_and_its_jobs_live_on(link: Link, cmd: str) -> None:
    job = int(text(link.shell("x=5; sleep 300 & echo $!", shell="a")))
    result = link.shell(f"echo before; {cmd}", shell="a", timeout=BRIEF_S)
    assert text(result) == "before\n"
    assert result["receipt"]["ending"] == "timed_out"
    assert text(link.shell("echo $x", shell="a")) == "5\n"
    assert not gone(job)


def test_a_command_that_ignores_interrupts_is_killed_with_what_it_started(link: Link) -> None:
    cmd = "trap '' INT TERM; sleep 300 & echo $!; while :; do sleep 300; done"
    result = link.shell(cmd, timeout=BRIEF_S)
    assert result["receipt"]["cause"]["rung"] == "kill"
    assert gone(int(text(result).split()[0]))
    assert text(link.shell("echo ok")) == "ok\n"


def test_output_of_a_job_is_labelled_with_the_next_result(link: Link) -> None:
    link.shell("mkfifo go; (read x < go; echo late) & exit 0")
    results = [link.shell("echo > go"), *(link.shell("sleep 0.02") for _ in range(20))]
    assert [result["background"]["head"] for result in results if result["background"]] == ["late\n"]
    assert all(text(result) == "" for result in results)


def test_a_dead_interpreter_leaves_shells_and_their_jobs(link: Link) -> None:
    job = int(text(link.shell("x=5; sleep 300 & echo $!", shell="a")))
    orphan = int(text(link.shell("setsid sleep 300 > /dev/null & echo $!")))
    link.run("import os; os._exit(1)")
    assert text(link.shell("echo $x", shell="a")) == "5\n"
    assert not gone(job)
    assert not gone(orphan)


@pytest.mark.parametrize(
    "call",
    [
        {"cmd": []},
        {"cmd": ""},
        {"cmd": ["a\0b"]},
        {"cmd": 5},
        {"cmd": "ls", "user": "nobody-else"},
        {"cmd": "ls", "env": {"A=B": "1"}},
        {"cmd": ["ls"], "shell": "a"},
        {"cmd": "ls", "shell": "x" * 100},
        {"cmd": "ls", "workdir": 7},
    ],
)
def test_wrong_arguments_are_refused_and_nothing_runs(link: Link, call: dict[str, object]) -> None:
    assert link.run(call)["code"] == "bad_request"
    assert link.ask("status")["status"]["sequence"] == 0


@pytest.mark.parametrize(
    "broken",
    [
        ["cat <<EOF\nunfinished", "echo $("],
        ["echo $(", "cat <<EOF\nunfinished"],
        ["echo $(", "echo $(", "echo $("],
        ["echo 'a", "if true", "( echo"],
    ],
)
def test_syntax_errors_in_a_named_shell_leave_it_and_its_variables(link: Link, broken: list[str]) -> None:
    link.shell("kept=5; cd /tmp", shell="a")
    for command in broken:
        assert link.shell(command, shell="a")["receipt"]["ending"] in ("ok", "raised")
    assert text(link.shell("echo $kept; pwd", shell="a")) == "5\n/tmp\n"


@pytest.mark.parametrize("long", ["", f": {'x' * 100_000}\n"])
def test_a_command_that_a_dying_shell_never_took_says_that_it_did_not_run(link: Link, long: str) -> None:
    pid = int(text(link.shell("echo $$", shell="a")))
    os.kill(pid, signal.SIGSTOP)
    call: dict[str, object] = {"cmd": f"{long}touch ran", "workdir": None, "env": {}, "shell": "a", "user": None}
    _, ident = link.submit(call, digest="d")
    link.until("started", ident=ident)
    os.kill(pid, signal.SIGKILL)
    result = link.until("result", ident=ident)
    assert (result["receipt"]["ending"], result["exit_code"]) == ("never_started", None)
    assert "before it took the command, which did not run" in " ".join(result["notes"])
    assert text(link.shell("ls ran || true", shell="a")).startswith("ls: ")
    died = link.shell("kill -9 $$", shell="a")
    assert (died["receipt"]["ending"], died["exit_code"]) == ("raised", 137)


def test_a_shell_that_ended_between_two_calls_is_told_by_the_next_in_it_once(link: Link) -> None:
    pid = int(text(link.shell("x=5; echo $$", shell="a")))
    link.shell(f"kill -9 {pid}")
    link.shell(f"while [ -e /proc/{pid} ]; do sleep 0.01; done")
    assert link.shell("true", shell="b")["notes"] == []
    told = link.shell("echo .$x", shell="a")
    assert text(told) == ".\n"
    assert "The earlier shell 'a' ended" in told["notes"][0]
    assert link.shell("true", shell="a")["notes"] == []
