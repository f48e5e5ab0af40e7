"""What a thread of root starts as another user has nothing of root; the thread and its process have lost nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxes.backends.guise import MACHINES, PR_GET_DUMPABLE, PR_SET_DUMPABLE, Guise

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

UID = 250_001
KEPT = ("Uid", "Gid", "Groups", "CapPrm", "CapEff", "CapBnd")
CAP_NET_RAW = 13
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2


def facts(status: str) -> dict[str, str]:
    return {name: " ".join(value.split()) for name, _, value in (line.partition(":") for line in status.splitlines())}


def own() -> dict[str, str]:
    found = facts(Path("/proc/thread-self/status").read_text())
    return {name: found[name] for name in KEPT}


def in_thread(body: Callable[[], None]) -> None:
    """Credentials are the thread's: whatever becomes of them, the other tests keep theirs."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(body).result()


def started(guise: Guise) -> dict[str, str]:
    with guise.worn(UID) as uid:
        identity = {} if uid is None else {"user": uid, "group": uid, "extra_groups": ()}
        process = subprocess.Popen(["cat", "/proc/self/status"], stdout=subprocess.PIPE, text=True, **identity)
    return facts(process.communicate()[0])


@pytest.mark.parametrize("machine", [platform.machine(), "another"])
def test_what_is_started_is_the_user_for_good_and_the_thread_is_root_again(machine: str) -> None:
    def body() -> None:
        join_groups(4, 24)
        before = own()
        found = started(Guise(machine))
        assert found["Uid"] == found["Gid"] == " ".join([str(UID)] * 4)
        assert found["Groups"] == ""
        assert {int(found[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
        assert own() == before

    in_thread(body)


@pytest.mark.parametrize("machine", [platform.machine(), "another"])
def test_capabilities_that_outlast_an_exec_are_not_passed_on(machine: str) -> None:
    def body() -> None:
        raise_inheritable(CAP_NET_RAW)
        assert ctypes.CDLL(None).prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_RAW, 0, 0) == 0
        found = started(Guise(machine))
        assert {int(found[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}

    in_thread(body)


def join_groups(*groups: int) -> None:
    number = ctypes.c_long(MACHINES[platform.machine()][0])
    assert ctypes.CDLL(None).syscall(number, len(groups), (ctypes.c_uint32 * len(groups))(*groups)) == 0
    assert os.getgroups() == [*groups]


def raise_inheritable(capability: int) -> None:
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[2] |= 1 << capability
    assert libc.capset(header, sets) == 0


def test_no_other_thread_is_changed_and_the_process_stays_as_dumpable_as_it_was() -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0
    worn, done = threading.Event(), threading.Event()

    def body() -> None:
        with Guise().worn(UID):
            assert own()["Uid"] == f"{UID} {UID} 0 {UID}"
            worn.set()
            assert done.wait(10)

    before = own()
    thread = threading.Thread(target=in_thread, args=(body,))
    thread.start()
    assert worn.wait(10)
    try:
        assert own() == before
    finally:
        done.set()
        thread.join()
    assert ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1


def test_a_program_that_cannot_be_started_leaves_the_thread_root() -> None:
    def body() -> None:
        before = own()
        with pytest.raises(OSError), Guise().worn(UID):
            subprocess.Popen(["/nonexistent/program"])
        assert own() == before

    in_thread(body)


def test_calls_that_only_say_that_they_were_done_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    getuid = {"x86_64": 102, "aarch64": 174}[platform.machine()]  # gives 0
    monkeypatch.setitem(MACHINES, "another", (getuid, getuid, getuid))

    def body() -> None:
        with pytest.raises(OSError, match=f"setresuid {UID}"):
            started(Guise("another"))

    in_thread(body)
