"""Starts processes as the user's uid, with the user's limits: programs by exec, and our own workers by fork alone.

Above: `python_process`, `shells`, `workers`. Below: fork(2). The agent has one thread, so a fork is safe.
"""

from __future__ import annotations

import resource
import time

from .lower import expose_to_out_of_memory, lower, rearrange
from .signals import signal
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from .config import Config

_FORK_TRIES = 10
_PATH = "/bin:/usr/bin"  # its own default, too
# Python ignores these, and an ignored signal stays ignored after exec.
_DEFAULTS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGHUP,
    signal.SIGQUIT,
)


class SpawnError(Exception):
    """A process could not be started; `errno` says why."""

    def __init__(self, errno: int, what: str) -> None:
        super().__init__(f"{what}: {os.strerror(errno)}")
        self.errno = errno


class Spawner:
    """Knows who user code is and what it may use. `relieve`: makes room when no program can be started;
    a worker, which a call can do without, gives up instead."""

    def __init__(self, config: Config, relieve: Callable[[], None]) -> None:
        self._config = config
        self._relieve = relieve
        self.rlimits = _rlimits(config)
        self._groups = config.drops

    def program(
        self,
        command: Sequence[str],
        *,
        descriptors: Sequence[int],
        environment: dict[str, str],
        directory: str,
    ) -> int:
        """Executes `command` in a session of its own, with `descriptors` as 0, 1, 2, ... and no others. Returns its
        pid once the new program runs. Raises SpawnError."""
        failed_in, failed_out = os.pipe()
        try:
            pid = self._fork(self._relieve)
            if pid == 0:
                self._become(command, descriptors, environment, directory, failed_out)
            os.close(failed_out)
            failed_out = -1
            said = os.read(failed_in, 256)
        finally:
            os.close(failed_in)
            if failed_out >= 0:
                os.close(failed_out)
        if said:
            number, _, what = said.decode("utf-8", "replace").partition(" ")
            raise SpawnError(int(number), what)
        if not self._config.drops:
            expose_to_out_of_memory(pid)  # it was hidden until it executed, and could not do it itself
        return pid

    def worker(self, work: Callable[[], None], descriptors: Sequence[int]) -> int:
        """Runs `work` in a fork of the agent as the user's uid, with `descriptors` as 0, 1, ... and no others; it ends
        with it. Returns its pid. Raises SpawnError."""
        pid = self._fork()
        if pid == 0:
            status = 1
            try:
                self._enter(descriptors)
                self._lower()
                os.chdir("/")
                work()
                status = 0
            finally:
                os._exit(status)
        return pid

    @staticmethod
    def _fork(relieve: Callable[[], None] | None = None) -> int:
        for attempt in range(_FORK_TRIES):
            try:
                return os.fork()
            except OSError as error:
                if attempt + 1 == _FORK_TRIES:
                    raise SpawnError(error.errno or 11, "no process can be started") from None
                if attempt == 1 and relieve is not None:
                    relieve()
                time.sleep(0.005)
        raise AssertionError

    def _become(
        self,
        command: Sequence[str],
        descriptors: Sequence[int],
        environment: dict[str, str],
        directory: str,
        failed: int,
    ) -> NoReturn:
        what = "the sandbox refuses the user's limits"
        try:
            failed = self._enter(descriptors, failed)
            self._lower()
            what = f"cannot enter {directory}"
            os.chdir(directory)
            what = f"cannot execute {command[0][:100]}"
            _execute(command, environment)
        except OSError as error:
            os.write(failed, f"{error.errno} {what}".encode("utf-8", "replace"))
        except BaseException as error:  # noqa: BLE001 - nothing of the parent may run on in the child
            os.write(failed, f"22 {what} ({error})".encode("utf-8", "replace"))
        finally:
            os._exit(127)

    @staticmethod
    def _enter(descriptors: Sequence[int], spare: int | None = None) -> int:
        """In the child, first: leaves everything of the agent behind. Returns the number that `spare` has now."""
        signal.set_wakeup_fd(-1)
        for number in _DEFAULTS:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        return rearrange(descriptors, spare)

    def _lower(self) -> None:
        config = self._config
        lower(self.rlimits, config.data, config.identity)


def _execute(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """As `execvpe` of `os`."""
    program = command[0]
    if "/" in program:
        os.execve(program, list(command), environment)
    missing: OSError | None = None
    refused: OSError | None = None
    for directory in environment.get("PATH", _PATH).split(":"):
        try:
            os.execve(f"{directory or '.'}/{program}", list(command), environment)
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = error
        except OSError as error:
            refused = refused or error
    raise refused or missing or AssertionError


def _rlimits(config: Config) -> list[tuple[int, int]]:
    limits = [(resource.RLIMIT_CORE, 0)]
    if config.open_files is not None:
        limits.append((resource.RLIMIT_NOFILE, config.open_files))
    if config.processes is not None:
        limits.append((resource.RLIMIT_NPROC, config.processes))
    if config.disk_bytes is not None:
        limits.append((resource.RLIMIT_FSIZE, config.disk_bytes))
    if config.memory_rlimit and config.memory_bytes is not None:
        # Not RLIMIT_AS: numeric libraries reserve far more addresses than they touch.
        limits.append((resource.RLIMIT_DATA, config.memory_bytes))
    return limits
