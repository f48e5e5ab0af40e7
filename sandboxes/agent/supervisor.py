"""PID 1 of the sandbox: builds the parts, reaps, and ends. It never runs user code.

Above: `starting`. Below: everything else in this directory.
"""

from __future__ import annotations

import sys
from time import monotonic

from . import config as configuration
from . import kernel
from .changes import Changes
from .connections import Connection, Connections
from .disk import BYTES_A_NAME, DiskWatch
from .executions import Executions
from .loop import Loop
from .processes import Ender, Moment, send
from .python import Python
from .requests import Requests
from .shells import Shells
from .signals import signal
from .spawn import Spawner, SpawnError
from .system import os
from .transfers import Transfers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .early import Early

_EXIT_CONFIG = 2


class Children:
    """Processes that somebody waits for. Everything else that ends is an adopted orphan and only reaped."""

    def __init__(self) -> None:
        self._expected: dict[int, Callable[[int, int], None]] = {}

    def expect(self, pid: int, ended: Callable[[int, int], None]) -> None:
        """Calls `ended(status, peak)` with what wait(2) says and the most memory it had, in bytes."""
        self._expected[pid] = ended

    def kill(self, pid: int) -> None:
        """Kills a child that was not reaped yet."""
        if pid in self._expected:
            send(pid, signal.SIGKILL)

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = self._expected.pop(pid, None)
            if ended is not None:
                ended(status, usage.ru_maxrss << 10)


class Supervisor:
    """The parts and how they hang together."""

    def __init__(self, config: Config, launcher: str, early: Early | None) -> None:
        self._config = config
        self._loop = Loop()
        self._children = Children()
        self._ender = Ender()
        spawner = Spawner(config, self._make_room)
        self._changes = Changes(config, self._loop, spawner, self._children)
        executions = Executions(config, self._loop, spawner, self._changes)
        self._python = Python(
            config,
            self._loop,
            spawner,
            self._children,
            executions,
            launcher,
            early,
            self._end_interpreters_rest,
            self._end_started,
        )
        self._executions = executions
        executions.performers["python"] = self._python
        self._shells = Shells(config, self._loop, spawner, self._children, executions, self._ender, self._not_shells)
        executions.performers["shell"] = self._shells
        self._disk = DiskWatch(
            config, self._loop, spawner, self._children, lambda: executions.current is not None, self._disk_full
        )
        executions.on_begin, executions.on_end = self._disk.begin, self._disk.end
        self._transfers = Transfers(config, self._loop, spawner, self._children, self._changes.not_ours)
        self._requests = Requests(config, executions, self._python, self._transfers, self.stop)
        self._connections = Connections(config, self._loop, self._requests.handle, self._closed)
        self._requests.connections = self._connections

    def run(self) -> None:
        """Until `stop`. The channel is up before the interpreter is."""
        self._loop.on_signal(signal.SIGCHLD, self._children.reap)
        if self._config.drops or os.getpid() != 1:
            # Else user code has our uid, and could end us with it; without a handler PID 1 ignores it.
            self._loop.on_signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._connections.start()
        self._loop.soon(self._launch)
        if self._config.fence_s is not None:
            self._loop.after(self._config.fence_s, self._fence)
        self._loop.run()
        self._connections.flush_all()
        self._ender.end_all()

    def stop(self) -> None:
        self._loop.stop()

    def _launch(self) -> None:
        try:
            self._python.launch()
        except SpawnError as error:
            os.write(2, f"agent: {error}\n".encode())

    def _closed(self, connection: Connection) -> None:
        self._requests.closed(connection)
        if self._config.channel["kind"] == "stdio":
            self.stop()  # nobody can ever speak to us again

    def _fence(self) -> None:
        assert self._config.fence_s is not None
        if self._connections.greeted():
            left = self._config.fence_s
        else:
            left = self._connections.last_host + self._config.fence_s - monotonic()
        if left <= 0:
            self.stop()
        else:
            self._loop.after(left, self._fence)

    def _workers(self) -> list[int]:
        pids = [self._changes.pid, self._disk.pid, *self._transfers.pids, *self._executions.worker_pids]
        return [pid for pid in pids if pid is not None]

    def _not_shells(self) -> list[int]:
        """Children of ours that no shell command can have left behind."""
        return self._workers() if self._python.pid is None else [*self._workers(), self._python.pid]

    def _end_interpreters_rest(self) -> None:
        """The interpreter has died: what it had started goes too, whatever session or parent that has by now."""
        if not self._ender.end_all_but([*self._workers(), *self._shells.pids]):
            self._executions.note_all_ended()

    def _end_started(self, since: Moment, survivor: int, ended_before: set[tuple[int, int]]) -> list[int]:
        """An execution was stopped and its interpreter survived: what it had started does not."""
        return self._ender.end_since(since, [*self._workers(), *self._shells.pids], survivor, ended_before)

    def _disk_full(self, used: int, names: int) -> None:
        limit = self._config.disk_bytes or 0
        why = f"files take {used >> 20} MiB and the limit is {limit >> 20} MiB"
        if used <= limit:
            why = f"files and directories are {names} and the limit is {limit // BYTES_A_NAME}"
        self._executions.stop_current(
            "operator", f"It was stopped because the session's {why}. Delete files before writing more."
        )

    def _make_room(self) -> None:
        """No process can be started: user code has taken them all, and loses them."""
        self._ender.end_all()


def main(source: str, launcher: str, early: Early | None = None) -> None:
    """The process. Exit status 2: the configuration is wrong. `early`: a first interpreter that waits already."""
    try:
        config = configuration.read(source)
    except (configuration.ConfigError, OSError, ValueError) as error:
        os.write(2, f"agent: configuration: {error}\n".encode())
        sys.exit(_EXIT_CONFIG)
    kernel.hide()
    kernel.no_new_privileges()
    if config.seccomp:
        kernel.refuse_calls(config.seccomp)
    kernel.adopt_orphans()
    Supervisor(config, launcher, early).run()
