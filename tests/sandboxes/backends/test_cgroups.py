"""Control groups: finding the hierarchies, and what is written to them. Version 1 is exercised for real by the tests of
the bubblewrap backend on machines that have it; here both versions are directories."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from sandboxes.backends import cgroups
from sandboxes.backends.cgroups import PIDS_MAX, Group, Hierarchies, find
from sandboxes.spec import Limits, Usage

LIMITS = Limits(memory_bytes=1 << 28, cpus=1.5, processes=100)


def mounts(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "mounts"
    path.write_text("".join(f"{line} 0 0\n" for line in lines))
    return path


def test_version_1_hierarchies_are_found_by_controller_and_only_where_they_can_be_written(tmp_path: Path) -> None:
    for name in ("memory", "cpu,cpuacct"):
        (tmp_path / name).mkdir()
    found = find(
        mounts(
            tmp_path,
            f"cgroup {tmp_path}/memory cgroup rw,memory",
            f"cgroup {tmp_path}/cpu,cpuacct cgroup rw,cpu,cpuacct",
            f"cgroup {tmp_path}/pids cgroup rw,pids",  # not there: as good as not writable
            f"cgroup2 {tmp_path}/unified cgroup2 rw",
        )
    )
    assert found.version == 1
    assert found.memory == tmp_path / "memory"
    assert found.cpu == found.cpuacct == tmp_path / "cpu,cpuacct"
    assert found.missing() == ["pids"]
    assert found.roots() == [tmp_path / "memory", tmp_path / "cpu,cpuacct"]


def test_version_2_controllers_are_passed_down_to_our_group(tmp_path: Path) -> None:
    root = tmp_path / "with space"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    found = find(mounts(tmp_path, f"cgroup2 {tmp_path}/with\\040space cgroup2 rw"))
    assert found == Hierarchies(2, root, root, root)
    assert found.missing() == []
    assert (root / "cgroup.subtree_control").exists()
    assert (root / "toolhost" / "cgroup.subtree_control").exists()


def test_version_2_without_the_right_to_pass_controllers_down_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    (tmp_path / "cgroup.subtree_control").mkdir()  # a write fails, as in a container whose top group has processes
    found = find(mounts(tmp_path, f"cgroup2 {tmp_path} cgroup2 rw"))
    assert found.missing() == ["memory", "pids", "cpu"]
    assert found.roots() == []


def test_version_2_limits_and_figures(tmp_path: Path) -> None:
    group = Group(Hierarchies(2, tmp_path, tmp_path, tmp_path), "s")
    own = tmp_path / "toolhost" / "s"
    own.mkdir(parents=True)
    (own / "memory.swap.max").write_text("max")
    group.make(LIMITS)
    group.limit_cpu(LIMITS)
    assert (own / "memory.max").read_text() == str(1 << 28)
    assert (own / "memory.swap.max").read_text() == "0"
    assert (own / "cpu.max").read_text() == "150000 100000"
    assert int((own / "pids.max").read_text()) > 100
    (own / "memory.current").write_text("4096\n")
    (own / "pids.current").write_text("3\n")
    (own / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (own / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert group.usage() == Usage(memory_bytes=4096, cpu_s=2.5, processes=3, oom_kills=2)


def test_version_1_limits_memory_and_swap_together(tmp_path: Path) -> None:
    group = Group(Hierarchies(1, memory=tmp_path), "s")
    own = tmp_path / "toolhost" / "s"
    own.mkdir(parents=True)
    (own / "memory.memsw.limit_in_bytes").write_text("-1")
    group.make(LIMITS)
    assert (own / "memory.limit_in_bytes").read_text() == (own / "memory.memsw.limit_in_bytes").read_text()


def test_more_processes_than_the_kernel_knows_are_its_maximum(tmp_path: Path) -> None:
    group = Group(Hierarchies(2, pids=tmp_path), "s")
    group.make(Limits(processes=1 << 40))
    assert (tmp_path / "toolhost" / "s" / "pids.max").read_text() == str(PIDS_MAX)


def test_removing_a_group_that_is_gone_is_no_error(tmp_path: Path) -> None:
    group = Group(Hierarchies(2, memory=tmp_path), "s")
    assert group.remove(1.0)
    (tmp_path / "toolhost" / "s").mkdir(parents=True)
    assert group.remove(1.0)
    assert not (tmp_path / "toolhost" / "s").exists()


def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    listed = tmp_path / "listed"
    listed.write_text(text)
    monkeypatch.setattr(cgroups, "THREAD", listed)


def test_a_thread_that_entered_a_version_1_group_goes_back_to_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some of its groups cannot be seen, as in a container, and where what is done inside fails."""
    memory, pids = tmp_path / "memory", tmp_path / "pids"
    home = memory / "system.slice"
    group = Group(Hierarchies(1, memory=memory, pids=pids), "s")
    group.make(LIMITS)
    for directory in (home, memory, pids):
        directory.mkdir(exist_ok=True)
        (directory / "tasks").write_text("")
    places(monkeypatch, tmp_path, "9:pids:/docker/unseen\n4:memory:/system.slice\n1:name=systemd:/x\n0::/unified\n")
    with pytest.raises(OSError, match="inside"), group.entered():
        inside = [(root / "toolhost" / "s" / "tasks").read_text() for root in (memory, pids)]
        assert inside == ["0", "0"]
        assert [(directory / "tasks").read_text() for directory in (home, memory, pids)] == ["", "", ""]
        raise OSError("inside")
    assert [(directory / "tasks").read_text() for directory in (home, memory, pids)] == ["0", "", "0"]


def test_a_thread_goes_back_also_where_no_file_can_be_opened_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(Hierarchies(1, memory=tmp_path / "memory", pids=tmp_path / "pids"), "s")
    group.make(LIMITS)
    homes = [tmp_path / name / "tasks" for name in ("memory", "pids")]
    for home in homes:
        home.write_text("")
    places(monkeypatch, tmp_path, "9:pids:/\n4:memory:/\n")

    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, group.entered():
        patch.setattr(os, "open", refused)
    assert [home.read_text() for home in homes] == ["0", "0"]


def test_a_version_2_group_is_not_entered_by_a_thread(tmp_path: Path) -> None:
    group = Group(Hierarchies(2, memory=tmp_path), "s")
    with group.entered():
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0 or find().version != 1, reason="needs root, and control groups of version 1")
def test_what_a_thread_starts_in_a_group_is_born_there_and_is_not_moved() -> None:
    group = Group(find(), f"test-{os.getpid()}")
    before = Path("/proc/thread-self/cgroup").read_text()
    group.make(LIMITS)
    try:
        with group.entered():
            child = subprocess.Popen(["sleep", "100"])
        assert Path("/proc/thread-self/cgroup").read_text() == before
        found = Path(f"/proc/{child.pid}/cgroup").read_text()
        assert found.count(f"/toolhost/{group.name}\n") == len(group.hierarchies.roots())
        assert group.processes() == [child.pid]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cgroups, "_put", lambda *_: pytest.fail("it is there already"))
            group.add(child.pid)
        moved = subprocess.Popen(["sleep", "100"])
        group.add(moved.pid)
        assert group.processes() == sorted([child.pid, moved.pid])
    finally:
        assert group.remove(10)
    assert (child.wait(), moved.wait()) == (-9, -9)


@pytest.mark.skipif(os.geteuid() != 0 or find().version != 1, reason="needs root, and control groups of version 1")
def test_a_group_with_a_thread_of_this_process_is_not_removed_and_the_process_not_killed() -> None:
    group = Group(find(), f"test-{os.getpid()}")
    group.make(LIMITS)
    with group.entered():
        assert not group.remove(0)
    assert group.remove(10)
