"""Which files an execution is said to have made or changed, by whoever looked: an interpreter itself, or a worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes.agent.driving import Agent, Link, children


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, limits={"disk_bytes": 1 << 30})
    yield agent
    assert agent.close() == ""


def files(result: dict[str, Any]) -> list[str]:
    return [file["path"].rpartition("/")[2] for file in result["files"]]


def write(name: str) -> str:
    return f"_ = open({name!r}, 'a').write('x')"


def test_each_change_is_told_once_whoever_looks(agent: Agent) -> None:
    link: Link = agent.claimed()
    assert files(link.run(write("a"))) == ["a"]
    assert files(link.shell("echo >b")) == ["b"]
    assert files(link.run("1")) == []
    assert files(link.shell("true")) == []
    assert sorted(files(link.run(f"{write('a')}\n{write('c')}"))) == ["a", "c"]


def test_what_the_shortest_command_writes_is_told_however_soon_it_ends(agent: Agent) -> None:
    link = agent.claimed()
    told = [files(link.shell(f"echo >b{number}")) for number in range(150)]
    assert [names for names in told if names] == [[f"b{number}"] for number, names in enumerate(told) if names]
    assert sum(not names for names in told) <= 1, "a look that a busy machine delays may be given up"


def test_what_a_dead_interpreter_had_written_is_told(agent: Agent) -> None:
    link = agent.claimed()
    result = link.run("f = open('last', 'w'); f.write('x'); f.close()\nimport os; os._exit(3)")
    assert result["receipt"]["ending"] == "killed"
    assert files(result) == ["last"]
    assert files(link.run("1")) == []


def test_code_that_spoils_looking_loses_no_result(agent: Agent) -> None:
    link = agent.claimed()
    spoil = "import os, sys, time\nos.scandir = os.stat = time.time_ns = None\n"
    result = link.run(
        spoil + "def no(event, _):\n  if event == 'os.scandir': raise OSError('no')\nsys.addaudithook(no)"
    )
    assert result["receipt"]["ending"] == "ok"
    result = link.run(f"{write('kept')}\n1")
    assert (result["value"], result["receipt"]["ending"]) == ("1", "ok")


def test_descriptors_that_are_used_up_are_no_reason_to_miss_a_file(agent: Agent) -> None:
    link = agent.claimed()
    code = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nopened = []\n"
    code += f"{write('full')}\ntry:\n    while True: opened.append(open('/dev/null'))\nexcept OSError: pass"
    assert files(link.run(code)) == ["full"]


def test_a_python_call_starts_no_process(agent: Agent) -> None:
    link = agent.claimed()
    link.run("1")
    interpreter = set(children(agent.pid))
    for _ in range(5):
        link.run(write("a"))
        assert set(children(agent.pid)) <= interpreter


def test_a_change_that_could_not_be_looked_for_in_time_is_not_listed_with_a_later_call(
    tmp_path: Path,
) -> None:
    agent = Agent(tmp_path)  # it has no other worker
    link = agent.claimed()
    interpreter = int(link.run("import os\nos.getpid()")["value"])
    link.shell("true")
    (worker,) = set(children(agent.pid)) - {interpreter}
    os.kill(worker, signal.SIGSTOP)
    assert files(link.shell(": >a")) == []
    assert files(link.shell("true")) == []
    assert files(link.run("1")) == []
    assert files(link.run(write("b"))) == ["b"], "an interpreter looks itself"
    assert agent.close() == ""
