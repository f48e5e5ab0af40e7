"""A control group per sandbox: memory without swap, processes, cpu. Version 1 and version 2.

Above: the bubblewrap backend, when it runs as root. Below: the cgroup file systems (kernel documentation,
admin-guide/cgroup-v1 and admin-guide/cgroup-v2).

Groups are made below the top of what is mounted (`/toolhost/NAME`), as container engines do, and not below the host's
own group: a service manager that stops the host would kill every sandbox with it, and a host that comes back would
find none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.spec import Limits, Usage

PARENT = "toolhost"
CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
PERIOD_US = 100_000  # over which cpu time is accounted; the kernel's default
# What the agent itself may use beside user code's processes, so that it can act when they have taken all of theirs.
AGENT_PROCESSES = 8
PIDS_MAX = 4_194_304  # the kernel's PID_MAX_LIMIT: it refuses to be told more
PAUSE_S = 0.005
MOUNTS = Path("/proc/self/mounts")
THREAD = Path("/proc/thread-self/cgroup")


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where each controller is mounted. In version 2 all are one directory. Empty: this machine has none of use."""

    version: int
    memory: Path | None = None
    pids: Path | None = None
    cpu: Path | None = None
    cpuacct: Path | None = None

    def roots(self) -> list[Path]:
        return list(dict.fromkeys(path for name in CONTROLLERS if (path := getattr(self, name)) is not None))

    def missing(self) -> list[str]:
        """Limits that cannot be held here."""
        names = {"memory": self.memory, "pids": self.pids, "cpu": self.cpu}
        return [name for name, path in names.items() if path is None]


def find(mounts: Path = MOUNTS) -> Hierarchies:
    """The hierarchies of this machine that this process may make groups in. Raises OSError."""
    controllers: dict[str, Path] = {}
    unified: Path | None = None
    for line in mounts.read_text().splitlines():
        _, target, kind, options = line.split()[:4]
        path = Path(target.encode().decode("unicode_escape"))
        if kind == "cgroup2":
            unified = path
        elif kind == "cgroup":
            for option in options.split(","):
                controllers.setdefault(option, path)
    # Both may be mounted: a controller belongs to version 2 only where version 1 has not taken it.
    if unified is not None and "memory" not in controllers:
        return _unified(unified)
    usable = {name: path for name, path in controllers.items() if os.access(path, os.W_OK)}
    return Hierarchies(1, usable.get("memory"), usable.get("pids"), usable.get("cpu"), usable.get("cpuacct"))


def _unified(root: Path) -> Hierarchies:
    parent = root / PARENT
    try:
        parent.mkdir(exist_ok=True)
        available = (root / "cgroup.controllers").read_text().split()
    except OSError:
        return Hierarchies(2)
    paths: dict[str, Path] = {}
    for name in ("memory", "pids", "cpu"):
        if name not in available:
            continue
        try:
            for directory in (root, parent):
                _put(directory / "cgroup.subtree_control", f"+{name}")
        except OSError:  # busy: inside a container the top group holds processes; without rights; read-only
            continue
        paths[name] = root
    return Hierarchies(2, paths.get("memory"), paths.get("pids"), paths.get("cpu"))


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one sandbox, in every hierarchy."""

    hierarchies: Hierarchies
    name: str

    def make(self, limits: Limits) -> None:
        """Makes it with its limits of memory and processes. Raises OSError; `remove` then removes what was made."""
        for root in self.hierarchies.roots():
            (root / PARENT / self.name).mkdir(parents=True, exist_ok=True)
        self._limit_memory(limits.memory_bytes)
        if (pids := self._path(self.hierarchies.pids)) is not None:
            _put(pids / "pids.max", str(min(limits.processes + AGENT_PROCESSES, PIDS_MAX)))

    def limit_cpu(self, limits: Limits) -> None:
        """Apart from the others, and before anything of the sandbox's runs in it: a thread of the host that is in it
        for a moment (`entered`) may hold what all of the host waits for. Raises OSError."""
        if (cpu := self._path(self.hierarchies.cpu)) is not None:
            quota = max(1000, int(limits.cpus * PERIOD_US))
            if self.hierarchies.version == 2:
                _put(cpu / "cpu.max", f"{quota} {PERIOD_US}")
            else:
                _put(cpu / "cpu.cfs_period_us", str(PERIOD_US))
                _put(cpu / "cpu.cfs_quota_us", str(quota))

    def _limit_memory(self, limit: int) -> None:
        memory = self._path(self.hierarchies.memory)
        if memory is None:
            return
        if self.hierarchies.version == 2:
            _put(memory / "memory.max", str(limit))
            swap = memory / "memory.swap.max"
        else:
            _put(memory / "memory.limit_in_bytes", str(limit))
            swap = memory / "memory.memsw.limit_in_bytes"
        # Absent where the kernel accounts no swap. In version 1 it is memory and swap together.
        if swap.exists():
            _put(swap, "0" if self.hierarchies.version == 2 else str(limit))

    def add(self, pid: int) -> None:
        """Moves a process into it, unless it was born there; what it starts from now on is in it. Raises OSError."""
        own = f"/{PARENT}/{self.name}"
        for root, path in self._places(Path(f"/proc/{pid}/cgroup")).items():
            if not f"/{path}".endswith(own):
                _put(root / PARENT / self.name / "cgroup.procs", str(pid))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Meanwhile the calling thread is in it, and what it starts is born there. Raises OSError.

        To move another process, the kernel waits until none of the machine is just starting or ending (some 7 ms); a
        thread that moves itself waits for nobody. A group of version 2 holds only whole processes: nothing is done.
        """
        with contextlib.ExitStack() as back:
            if self.hierarchies.version == 1:
                for root, path in self._places(THREAD).items():
                    # In a container without a namespace of control groups, its own is the top of what is mounted.
                    home = root / path if (root / path / "tasks").exists() else root
                    # Opened now: a host that has no descriptor left must come back as well.
                    descriptor = _opened(home / "tasks")
                    back.callback(os.close, descriptor)
                    back.callback(os.write, descriptor, b"0")
                    _put(root / PARENT / self.name / "tasks", "0")
            yield

    def _places(self, listed: Path) -> dict[Path, str]:
        """Where a process or thread is, below the top of each hierarchy: from its `cgroup` file (cgroups(7))."""
        paths: dict[str, str] = {}
        for line in listed.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if bool(controllers) == (self.hierarchies.version == 1):  # the line without any is version 2's
                paths |= dict.fromkeys(controllers.split(",") if controllers else CONTROLLERS, path.lstrip("/"))
        found = {getattr(self.hierarchies, name): paths.get(name, "") for name in CONTROLLERS}
        return {root: path for root, path in found.items() if root is not None}

    def processes(self) -> list[int]:
        """Pids of what is in it now."""
        found: set[int] = set()
        for root in self.hierarchies.roots():
            with contextlib.suppress(FileNotFoundError, OSError):
                found.update(int(line) for line in (root / PARENT / self.name / "cgroup.procs").read_text().split())
        return sorted(found)

    def remove(self, timeout_s: float) -> bool:
        """Kills what is still in it and removes it. True when nothing of it is left. Idempotent."""
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            for pid in left:
                if pid == os.getpid():  # a thread of ours could not go back
                    return False
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE_S)
        return all(_remove(root / PARENT / self.name, deadline) for root in self.hierarchies.roots())

    def usage(self) -> Usage:
        """What it uses now; what this machine does not account is None."""
        version = self.hierarchies.version
        memory = self._path(self.hierarchies.memory)
        pids = self._path(self.hierarchies.pids)
        return Usage(
            memory_bytes=_number(memory, "memory.current" if version == 2 else "memory.usage_in_bytes"),
            cpu_s=self._cpu_s(),
            processes=_number(pids, "pids.current"),
            oom_kills=_field(memory, "memory.events" if version == 2 else "memory.oom_control", "oom_kill"),
        )

    def _cpu_s(self) -> float | None:
        if self.hierarchies.version == 2:
            spent = _field(self._path(self.hierarchies.cpu), "cpu.stat", "usage_usec")
            return None if spent is None else spent / 1e6
        spent = _number(self._path(self.hierarchies.cpuacct), "cpuacct.usage")
        return None if spent is None else spent / 1e9

    def _path(self, root: Path | None) -> Path | None:
        return None if root is None else root / PARENT / self.name


def _put(path: Path, text: str) -> None:
    """Without the layers of a file object: a sandbox's start is a dozen of these."""
    descriptor = _opened(path)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    """To write. (The tests write to plain files.)"""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)


def _number(directory: Path | None, name: str) -> int | None:
    if directory is None:
        return None
    try:
        return int((directory / name).read_text())
    except (OSError, ValueError):
        return None


def _field(directory: Path | None, name: str, field: str) -> int | None:
    if directory is None:
        return None
    try:
        text = (directory / name).read_text()
    except OSError:
        return None
    fields = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    return int(fields[field]) if field in fields else None


def _remove(path: Path, deadline: float) -> bool:
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            # The last process has ended, and the kernel is not yet done with the group.
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE_S)
        else:
            return True
