"""The agent as PID 1 of real namespaces, root with three capabilities, user code as another uid."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .driving import AGENT, LAUNCHER, Agent, Link, text

UID = 12345
PYTHON = os.path.realpath(sys.executable)
BWRAP = shutil.which("bwrap")

pytestmark = [
    pytest.mark.bubblewrap,
    pytest.mark.skipif(BWRAP is None or os.getuid() != 0, reason="needs bwrap, and root to drop from"),
]


def reachable(directory: str) -> list[str]:
    """Options that make every directory above `directory` one that any uid may enter."""
    above = [str(parent) for parent in reversed(Path(directory).parents) if str(parent) != "/"]
    return [option for parent in above for option in ("--perms", "0755", "--dir", parent)]


def wrap(command: list[str], data: Path) -> list[str]:
    os.chown(data, UID, UID)
    inside = "/opt/agent/toolhost_agent.py"
    return [
        str(BWRAP),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--as-pid-1", "--clearenv"),
        *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
        *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
        *(*reachable(sys.base_prefix), "--ro-bind", sys.base_prefix, sys.base_prefix),
        *("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/tmp"),
        *(*reachable("/opt/agent"), "--ro-bind", str(AGENT), "/opt/agent"),
        *(*reachable("/mnt/data"), "--bind", str(data), "/mnt/data"),
        *("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL", "--"),
        *(inside if word == str(LAUNCHER) else word for word in command),
    ]


@pytest.fixture
def boxed(tmp_path: Path) -> Iterator[Callable[..., Link]]:
    agents = []

    def start(**limits: int) -> Link:
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/mnt/data"}
        agent = Agent(tmp_path, wrap=wrap, python=PYTHON, uid=UID, gid=UID, environment=environment, limits=limits)
        agents.append(agent)
        return agent.claimed()

    yield start
    for agent in agents:
        assert agent.close() == ""


def test_user_code_is_another_uid_without_groups_or_capabilities(boxed: Callable[..., Link]) -> None:
    link = boxed(open_files=200, processes=50)
    status = dict(
        line.split(":", 1) for line in text(link.run("print(open('/proc/self/status').read())")).split("\n") if line
    )
    assert status["Uid"].split() == [str(UID)] * 4
    assert status["Gid"].split() == [str(UID)] * 4
    assert status["Groups"].split() == []
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapAmb"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    assert text(link.shell("id -u; ulimit -n; ulimit -c; cat /proc/self/oom_score_adj")).split() == [
        str(UID),
        "200",
        "0",
        "1000",
    ]


@pytest.mark.parametrize(
    "attack",
    [
        "open('/proc/1/environ').read()",
        "open('/proc/1/mem').read()",
        "os.listdir('/proc/1/fd')",
        "os.readlink('/proc/1/fd/4')",
        "os.kill(1, signal.SIGKILL)",
        "os.kill(1, signal.SIGSTOP)",
        "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "os.setuid(0)",
        "open('/opt/agent/wire.py', 'a')",
        "open('/opt/agent/new', 'w')",
    ],
)
def test_user_code_cannot_touch_the_agent(boxed: Callable[..., Link], attack: str) -> None:
    link = boxed()
    result = link.run(f"import os, signal, resource\n{attack}")
    assert result["receipt"]["ending"] == "raised"
    assert result["error"].rpartition("\n")[2].startswith(("PermissionError", "OSError"))
    assert link.run("1+1")["value"] == "2"


def test_a_fork_bomb_ends_with_its_cell_and_nothing_of_it_is_left(boxed: Callable[..., Link]) -> None:
    link = boxed(processes=40)
    link.run("x = 1")
    result = link.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", timeout=1.0)
    assert result["receipt"]["ending"] == "timed_out"
    look = (
        "import os\nstates = []\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: states.append(open(f'/proc/{pid}/stat').read().split()[2])\n"
        "    except OSError: continue  # it has just gone\nprint(states)"
    )
    seen = link.run(look)  # the bomb may have cost the interpreter
    assert seen["error"] is None, seen["error"]
    states = text(seen)
    left = [state for state in json.loads(states.replace("'", '"')) if state != "Z"]
    assert len(left) <= 3  # the agent, its worker, the interpreter
    assert link.run("1+1")["value"] == "2"


def test_daemons_of_a_killed_interpreter_are_gone(boxed: Callable[..., Link]) -> None:
    link = boxed()
    link.run("import subprocess\nfor _ in range(3): subprocess.Popen(['setsid', 'setsid', 'sleep', '300'])")
    link.run("import os; os._exit(0)")
    assert "sleep" not in text(link.shell("cat /proc/[0-9]*/comm"))


def test_killing_every_process_it_may_kill_hurts_only_itself(boxed: Callable[..., Link]) -> None:
    link = boxed()
    code = "import os, signal, subprocess\nsubprocess.Popen(['sleep', '60'])\nos.kill(-1, signal.SIGKILL)\n"
    code += "while True: pass"
    result = link.run(code, timeout=5.0)
    assert result["receipt"]["ending"] in ("killed", "timed_out")
    assert link.run("print('y' * 30_000)")["output"]["file"].endswith(".txt")
    assert link.run("open('f', 'w') and None")["receipt"]["ending"] == "ok"


def test_files_are_the_users_and_are_written_as_the_user(boxed: Callable[..., Link]) -> None:
    link = boxed()
    put = {"op": "put", "path": "d/a", "upload": "u", "offset": 0, "piece": "YWI=", "last": True}
    assert link.ask("files", **put)["t"] == "ok"
    link.run("print('x' * 30_000)")
    owners = text(link.shell("stat -c %u d d/a .outputs .outputs/1.txt")).split()
    assert owners == [str(UID)] * 4
    assert link.run("open('d/a').read()")["value"] == "'ab'"


def test_files_that_only_root_could_read_are_not_read_for_the_user(boxed: Callable[..., Link], tmp_path: Path) -> None:
    link = boxed()
    (tmp_path / "data" / "root").write_text("secret")
    (tmp_path / "data" / "root").chmod(0o600)
    assert link.ask("files", op="get", path="root", limit=100)["code"] == "bad_request"
