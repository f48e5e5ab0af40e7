"""The machines that the cluster's tests run on: apart from each other, cut and killed as asked, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import until
from tests.support.machines import REPOSITORY, Machine, Site, no_machines

ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=2).status)"
SERVE = [sys.executable, "-m", "http.server", "80", "--directory", "/run"]
KILLED = """
import os, signal, sys
from tests.support.machines import Site
site = Site()
machine = site.machine("a")
machine.popen(["sleep", "1000"])
orphan = "import subprocess; subprocess.Popen(['sleep', '1001'], start_new_session=True)"
machine.popen([sys.executable, "-c", orphan]).wait()
print(site.directory, *(process.pid for process in machine.processes()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

pytestmark = pytest.mark.skipif(no_machines() is not None, reason=str(no_machines()))


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as made:
        yield made


def serving(machine: Machine) -> None:
    machine.popen(SERVE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: connects(machine), "the server does not answer")


def connects(machine: Machine) -> bool:
    with contextlib.suppress(OSError):
        machine.connection(80).close()
        return True
    return False


def answers(asking: Machine, asked: Machine) -> bool:
    done = asking.python(ASK, f"http://{asked.address}/", check=False)
    return done.stdout.strip() == "200"


def test_machines_have_their_own_network_processes_and_temporary_files(site: Site) -> None:
    a, b = site.machine("a"), site.machine("b")
    serving(b)
    assert answers(a, b)
    assert not answers(a, a), "a has no server"
    with urllib.request.urlopen(f"http://127.0.0.1:{b.forward(80)}/", timeout=10) as answer:
        assert answer.status == 200, "the test reaches it through the forward"
    assert [process.command for process in a.processes()] == []
    assert [process.inside for process in b.processes()] == [2], "it is the first after the machine's own"
    a.run(["sh", "-c", "echo a > /tmp/file"])
    assert b.run(["cat", "/tmp/file"], check=False).returncode != 0
    assert (a.root / "tmp/file").read_text() == "a\n"
    (site.shared / "both").write_text("seen")
    assert [machine.run(["cat", str(site.shared / "both")]).stdout for machine in (a, b)] == ["seen", "seen"]
    assert a.run(["hostname"]).stdout == "a\n"
    assert "eth0" not in a.run(["ip", "route", "get", "192.0.2.1"], check=False).stdout, "no way out of the segment"


def test_a_cut_cable_loses_packets_and_a_mended_one_carries_them(site: Site) -> None:
    a, b = site.machine("a"), site.machine("b")
    serving(b)
    assert answers(a, b)
    b.cut()
    assert not answers(a, b)
    assert b.python(ASK, "http://127.0.0.1/").stdout.strip() == "200", "the machine itself goes on"
    b.mend()
    assert answers(a, b)


def test_a_killed_machine_has_no_processes_and_boots_with_its_disk(site: Site) -> None:
    a = site.machine("a")
    a.run(["sh", "-c", "echo kept > /tmp/file"])
    serving(a)
    orphan = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    a.popen([sys.executable, "-c", orphan]).wait()
    before = a.processes()
    assert len(before) == 2
    a.kill()
    assert [process for process in before if psutil.pid_exists(process.pid)] == []
    assert a.processes() == [] and not a.up
    a.boot()
    assert a.processes() == []
    assert a.run(["cat", "/tmp/file"]).stdout == "kept\n"


def test_a_program_of_a_machine_is_signalled_not_what_started_it(site: Site) -> None:
    a = site.machine("a")
    handler = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('on', flush=True); signal.pause()"
    program = a.popen([sys.executable, "-c", handler], stdout=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stdout.readline() == b"on\n"
    program.terminate()
    assert program.wait(10) == 7
    program.stdout.close()


def test_nothing_is_left_of_a_test_that_was_killed() -> None:
    links = set(os.listdir("/sys/class/net"))
    done = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    directory, *pids = done.stdout.split()
    assert len(pids) == 2
    _, left = psutil.wait_procs([process for pid in pids if (process := _process(int(pid)))], timeout=20)
    assert left == []
    until(lambda: not Path(directory).exists(), "the test's directory stays")
    assert set(os.listdir("/sys/class/net")) == links


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
