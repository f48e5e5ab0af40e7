"""The first interpreter, which is started before the agent is configured: user code sees no difference between it and a
later one, and it holds nothing of the agent's."""

from __future__ import annotations

import ast
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes.agent.driving import Agent, Link, eventually, text

SEEN = """
import os, resource, signal, stat, sys
def seen():
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {
        "environment": dict(os.environ),
        "descriptors": sorted(
            (int(fd), stat.S_IFMT(os.stat(f"/proc/self/fd/{fd}").st_mode))
            for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
        ),
        "signals": {int(number): str(how) if not callable(how) else how.__name__ for number, how in signals.items()},
        "limits": {name: resource.getrlimit(getattr(resource, name))
               for name in dir(resource) if name[:7] == "RLIMIT_"},
        "flags": str(sys.flags), "path": sys.path, "argv": sys.argv, "executable": sys.executable,
        "encodings": (sys.getfilesystemencoding(), sys.stdout.encoding, sys.flags.utf8_mode),
        "nice": os.nice(0), "umask": os.umask(0o022), "directory": os.getcwd(), "session": os.getsid(0) == os.getpid(),
        "ids": (os.getresuid(), os.getresgid(), os.getgroups()),
        "dumpable": os.access("/proc/self/mem", os.R_OK | os.W_OK),
        "modules": sorted(name for name in sys.modules if "toolhost_agent" not in name),
    }
print(seen())
"""
# Two halves, so that what looks for the whole does not hold it.
LOOK = """
import re
control = "".join(("0123456789abcdef", "fedcba9876543210"))
def found(halves):
    regions = []
    for line in open("/proc/self/maps"):
        m = re.match(r"([0-9a-f]+)-([0-9a-f]+) r", line)
        if m and "[v" not in line:
            regions.append((int(m[1], 16), int(m[2], 16)))
    buffer = bytearray(1 << 20)  # mapped by itself, after the list was made
    first, second = (half.encode() for half in halves)
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for begin, end in regions:
            for start in range(begin, end, len(buffer) - 64):
                memory.seek(start)
                try:
                    got = memory.readinto(memoryview(buffer)[: min(len(buffer), end - start)])
                except OSError:
                    break
                at = buffer.find(first, 0, got)
                while at >= 0:
                    if buffer[at + len(first) : at + len(first) + len(second)] == second:
                        return True
                    at = buffer.find(first, at + 1, got)
    return False
print(found(("0123456789abcdef", "fedcba9876543210")), found({nonce}))
"""


# Starts what is named behind it as a host does that was started with `&` by a shell script, with nohup, or by worse:
# one CI ignored 32 and 33 as well, which the C library keeps for its threads and which no program can set through it.
IGNORING = """
import ctypes, os, platform, signal, sys
call = {"x86_64": 13, "aarch64": 134}[platform.machine()]
for number in (32, 33):
    ignored = (ctypes.c_ulong * 4)(1)
    assert ctypes.CDLL(None).syscall(call, number, ignored, None, 8) == 0
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.argv[1], sys.argv[1:])
"""
STATUS = "grep -E 'Sig(Blk|Ign)' /proc/self/status"


def masks(status: str) -> list[int]:
    """The blocked and the ignored signals of a status, but for the C library's own: it sets them when it needs them."""
    settable = sum(1 << (number - 1) for number in signal.valid_signals())
    return [int(line.split()[1], 16) & settable for line in status.splitlines()]


def start(directory: Path, how: str, before: Sequence[str] = (), **config: Any) -> Agent:
    def early(command: list[str], _data: Path) -> list[str]:
        if how == "fork":
            command = [part for part in command if part != "-S"]
        return [*before, *command, how]

    data = {"data": str(directory / "data"), "peer_check": False}
    return Agent(directory, wrap=early, **{**data, **config})


@pytest.fixture(params=["early", "fork"])
def how(request: pytest.FixtureRequest) -> str:
    """Executed, or forked from the agent."""
    return str(request.param)


@pytest.fixture
def agent(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.delenv("LC_CTYPE", raising=False)
    running = start(tmp_path, how, limits={"open_files": 512, "disk_bytes": 1 << 30})
    yield running
    running.close()


def seen(link: Link) -> tuple[dict[str, Any], int]:
    """What user code sees, and the interpreter's pid."""
    found = ast.literal_eval(text(link.run(SEEN, digest="d")))
    return found, int(link.run("import os; os.getpid()")["value"])


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_what_user_code_sees_is_the_same_in_the_first_and_in_a_later_interpreter(agent: Agent) -> None:
    link = agent.claimed()
    first, pid = seen(link)
    assert "interpreter" not in command_line(pid)
    link.run("os._exit(3)")
    later, pid = seen(link)
    assert "interpreter" in command_line(pid)
    more = set(first.pop("modules")) - set(later.pop("modules"))
    assert more <= {"_socket", "_json", "_operator", "gc"}  # by which it was made and sent off
    assert first == later


def test_signals_that_the_host_ignores_or_blocks_are_neither_in_any_process(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.delenv("LC_CTYPE", raising=False)
    agent = start(tmp_path, how, before=[sys.executable, "-c", IGNORING])
    try:
        link = agent.claimed()
        first, pid = seen(link)
        assert "interpreter" not in command_line(pid)
        signals = first["signals"]
        assert {number for number, how in signals.items() if how == "1"} == {signal.SIGPIPE, signal.SIGXFSZ}  # Python's
        code = f"import subprocess\nprint(subprocess.getoutput({STATUS!r}))"
        assert masks(text(link.run(code, digest="s"))) == [0, 0]
        assert masks(text(link.run({"cmd": ["sh", "-c", STATUS]}))) == [0, 0]
        link.run("os._exit(3)")
        later, pid = seen(link)
        assert "interpreter" in command_line(pid)
        assert later["signals"] == signals
        receipt = link.run("while True: pass", timeout=1.0)["receipt"]
        assert (receipt["ending"], receipt["state"]) == ("timed_out", "kept")  # SIGINT got through
    finally:
        agent.close()


def test_no_secret_of_the_agents_is_in_the_first_interpreters_memory(agent: Agent) -> None:
    half = len(agent.nonce) // 2
    halves = (agent.nonce[:half], agent.nonce[half:])
    result = agent.claimed().run(LOOK.replace("{nonce}", repr(halves)), digest="d")
    assert (text(result), result["error"]) == ("True False\n", None)


def test_an_environment_that_a_running_process_cannot_take_is_given_to_a_later_one(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANG", "C")
    agent = start(tmp_path, how)
    try:
        link = agent.claimed()
        assert "interpreter" in command_line(int(link.run("import os; os.getpid()")["value"]))
        assert link.run("os.environ['LANG']")["value"] == "'C.UTF-8'"
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        assert eventually(lambda: len(children.read_text().split()) == 1)  # the one that was not wanted is gone
    finally:
        agent.close()
