"""The processes of the sandbox: who descends from whom, and ending what belongs to a killed execution.

Above: `supervisor`, `python_process`, `shells`. Below: /proc and kill(2). Where the agent is PID 1 it sees every
process of the sandbox and nothing else; elsewhere (in tests) it touches its own descendants only.
"""

from __future__ import annotations

import time

from .signals import signal
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

KILL = signal.SIGKILL
# How long processes that were not there before may keep appearing before the whole sandbox's user code goes, and how
# long those that were killed may take to go: the kernel frees their memory first, and the machine may be busy.
_MULTIPLYING_S = 0.5
_GOING_S = 1.0
_ROUNDS = 30
_ENDED = (b"Z", b"X")
_TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """One line of the table. `started` (clock ticks) tells a process from a later one with its pid."""

    __slots__ = ("group", "parent", "pid", "session", "started", "state")

    def __init__(self, pid: int, stat: bytes) -> None:
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.pid = pid
        self.state = fields[0]
        self.parent = int(fields[1])
        self.group = int(fields[2])
        self.session = int(fields[3])
        self.started = int(fields[19])


def table() -> dict[int, Process]:
    """Every process that can be seen, zombies left out."""
    return {pid: process for pid, process in _all().items() if process.state not in _ENDED}


def _open_load() -> int:
    try:
        load = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    if not _newest_pid(load):  # gVisor tells none, and lets user code see what the agent has open
        os.close(load)
        return -1
    return load


def _newest_pid(load: int) -> int:
    """0 where it is not known."""
    try:
        return int(os.pread(load, 256, 0).rpartition(b" ")[2])
    except (OSError, ValueError):
        return 0


# Held open: it is read for every execution.
_load = _open_load()


class Moment:
    """Now. The kernel dates processes by ticks of 10 ms as a rule: of those that started in the same tick the newest
    pid tells which came later (proc(5), loadavg). Where that is not known, as in gVisor, they all count as later."""

    __slots__ = ("newest", "tick")

    def __init__(self) -> None:
        self.tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)
        self.newest = _newest_pid(_load)

    def precedes(self, process: Process) -> bool:
        return process.started > self.tick or (process.started == self.tick and process.pid > self.newest)


def unreaped(parent: int, since: Moment) -> set[tuple[int, int]]:
    """Children of `parent` that started after `since` and have ended, and that it has not waited for."""
    return {
        (process.pid, process.started)
        for process in _all().values()
        if process.parent == parent and since.precedes(process) and process.state in _ENDED
    }


def _all() -> dict[int, Process]:
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:  # noqa: PTH123
                found[int(name)] = Process(int(name), file.read(1024))
        except (OSError, ValueError, IndexError):
            continue
    return found


def descendants(processes: dict[int, Process], roots: Iterable[int]) -> set[int]:
    """`roots` and everything below them, and every member of a session that one of `roots` leads."""
    roots = set(roots)
    return _below(processes, roots | {process.pid for process in processes.values() if process.session in roots})


def _below(processes: dict[int, Process], below: set[int]) -> set[int]:
    while True:
        more = {process.pid for process in processes.values() if process.parent in below and process.pid not in below}
        if not more:
            return below
        below = below | more


def send(pid: int, number: int) -> None:
    """kill(2) that does not mind a process that is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def send_group(group: int, number: int) -> None:
    """killpg(2) that does not mind a group that is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


class Ender:
    """Ends what belongs to an execution. `keep_roots` name processes whose descendants stay; orphans that a shell's
    command left are noted with `adopt` and stay too."""

    def __init__(self) -> None:
        self._agent = os.getpid()
        self._first = self._agent == 1
        self._adopted: dict[int, int] = {}  # pid -> started

    def adopt(self, before: dict[int, Process], mine: Iterable[int]) -> None:
        """Orphans that were not there `before` belong to the shell command that has just ended."""
        mine = set(mine)
        self._adopted.update(
            {
                pid: process.started
                for pid, process in table().items()
                if process.parent == self._agent and pid not in mine and pid not in before
            }
        )

    def end_all_but(self, keep_roots: Iterable[int]) -> bool:
        """Kills all user code save what descends from `keep_roots` or was adopted. False: it could not be told apart
        in time (something forks faster than the table is read), and everything was killed."""
        keep_roots = set(keep_roots)
        return self._end(lambda: self._doomed(keep_roots))

    def end_since(
        self, since: Moment, keep_roots: Iterable[int], survivor: int, ended_before: set[tuple[int, int]]
    ) -> list[int]:
        """Kills what an execution started, after `since`, while `survivor`, which ran it, lives on: neither
        what descends from `keep_roots` nor what was adopted. What forks too fast to be outrun takes all with
        it. Returns the survivor's children that were ended, here or by an interrupt before: they are its own to reap.
        Of those `ended_before` the interrupts the user's code may still want to know how."""
        keep_roots = set(keep_roots)
        orphaned: set[int] = set()

        def started() -> dict[int, Process]:
            doomed = {
                pid: process
                for pid, process in self._doomed(keep_roots).items()
                if since.precedes(process) and pid != survivor
            }
            orphaned.update(pid for pid, process in doomed.items() if process.parent == survivor)
            return doomed

        self._end(started)
        return sorted(orphaned | {pid for pid, _ in unreaped(survivor, since) - ended_before})

    def _end(self, look: Callable[[], dict[int, Process]]) -> bool:
        """Kills what `look` finds until it finds nothing new. What was killed is not counted as multiplying while it
        takes its time to go; what is still there after a while can start nothing any more, and is left to the
        kernel. False: new ones kept coming, and everything was killed."""
        killed: set[tuple[int, int]] = set()
        began = time.monotonic()
        first = True
        while True:
            doomed = look()
            fresh = {pid: process for pid, process in doomed.items() if (pid, process.started) not in killed}
            spent = time.monotonic() - began
            if not doomed or (not fresh and spent > _GOING_S):
                return True
            if fresh and not first and spent > _MULTIPLYING_S:
                self.end_all()
                return False
            # Stopping first: what does not run does not fork, and the next table is complete.
            stop = first and len(fresh) > 1
            for pid, process in fresh.items():
                send(pid, signal.SIGSTOP if stop else KILL)
                if not stop:
                    killed.add((pid, process.started))
            first = False
            if not fresh:
                time.sleep(0.001)

    def end_below(self, roots: Iterable[int]) -> None:
        """Kills `roots`, all their descendants and the members of their sessions."""
        roots = set(roots)
        for _ in range(_ROUNDS):
            processes = table()
            doomed = descendants(processes, roots) & processes.keys() - {self._agent}
            if not doomed:
                return
            for pid in doomed:
                send(pid, KILL)
            time.sleep(0.001)

    def end_foreground(self, root: int, before: dict[int, Process]) -> None:
        """Kills what `root` has below it that was not there `before`, save what ignores interrupts: jobs."""
        processes = table()
        for pid in (_below(processes, {root}) & processes.keys()) - {root}:
            older = before.get(pid)
            if (older is None or older.started != processes[pid].started) and not _ignores_interrupt(pid):
                send(pid, KILL)

    def end_all(self) -> None:
        """Kills everything but the agent, at once."""
        if self._first:
            try:
                os.kill(-1, KILL)
            except ProcessLookupError:
                return
        else:
            self.end_below(pid for pid, process in table().items() if process.parent == self._agent)

    def _doomed(self, keep_roots: set[int]) -> dict[int, Process]:
        processes = table()
        self._adopted = {
            pid: started
            for pid, started in self._adopted.items()
            if pid in processes and processes[pid].started == started
        }
        kept = descendants(processes, keep_roots | self._adopted.keys()) | {self._agent}
        if self._first:
            return {pid: process for pid, process in processes.items() if pid not in kept}
        below = _below(processes, {self._agent})
        return {pid: process for pid, process in processes.items() if pid in below and pid not in kept}


def _ignores_interrupt(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:  # noqa: PTH123
            lines = file.read(8192).split(b"\n")
    except OSError:
        return False
    masks = [line.split()[1] for line in lines if line.startswith(b"SigIgn:")]
    return bool(masks) and bool(int(masks[0], 16) & 1 << (signal.SIGINT - 1))
