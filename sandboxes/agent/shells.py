"""Runs commands: in a process of their own, or in named shells that keep directory, variables and background jobs.

Above: `executions`, `requests` (check). Below: `spawn`, `processes`, `named_shell`.

A command's end is its process's end, or what its shell says on a descriptor that the command does not have. Its output
cannot forge that; and what lives on in the background is output "between the calls" from then on.
"""

from __future__ import annotations

from .named_shell import NamedShell, find_shell
from .pipes import Pipe
from .processes import send_group, table
from .signals import signal
from .spawn import SpawnError
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .executions import Executions
    from .loop import Loop
    from .processes import Ender, Process
    from .run import Run
    from .spawn import Spawner
    from .supervisor import Children

_MAX_SHELLS = 16
_MAX_NAME = 64
_MAX_BACKGROUND_PIPES = 32


def check(call: dict[str, object], config: Config) -> str | None:
    """What is wrong with the arguments of a shell call; None: nothing."""
    cmd, env, name = call.get("cmd"), call.get("env") or {}, call.get("shell")
    if isinstance(cmd, list):
        if not cmd or not all(isinstance(word, str) and "\0" not in word for word in cmd):
            return "cmd as a list has at least one word, and texts without NUL only"
        if name is not None:
            return "a named shell takes its command as one text"
    elif not isinstance(cmd, str) or not cmd.strip() or "\0" in cmd:
        return "cmd is a text without NUL, or a list of such"
    if not isinstance(env, dict) or not all(_is_variable(key, value) for key, value in env.items()):
        return "env is an object of texts; a name has no '=' and neither has a NUL"
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME):
        return f"session_name is a text of 1 to {_MAX_NAME} characters"
    directory = call.get("workdir")
    if directory is not None and (not isinstance(directory, str) or "\0" in directory or len(directory) > 4096):
        return "workdir is a path"
    return _check_user(call.get("user"), config)


def _is_variable(key: str, value: object) -> bool:
    return bool(key) and "=" not in key and "\0" not in key and isinstance(value, str) and "\0" not in value


def _check_user(user: object, config: Config) -> str | None:
    """Only who user code runs as anyway: everything else is the agent's, or nobody's."""
    if user in (None, ""):
        return None
    uid = os.getuid() if config.uid is None else config.uid
    allowed = {str(uid), "user", "sandbox"}
    if isinstance(user, str) and user.partition(":")[0] in allowed:
        return None
    return f"commands run as uid {uid}; another user is not available in this sandbox"


class Shells:
    """The performer of kind "shell"."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        spawner: Spawner,
        children: Children,
        executions: Executions,
        ender: Ender,
        ours: Callable[[], list[int]],
    ) -> None:
        self._config = config
        self._loop = loop
        self._spawner = spawner
        self._children = children
        self._executions = executions
        self._ender = ender
        self._ours = ours
        self._named: dict[str, NamedShell] = {}
        self._died: dict[str, None] = {}  # shells that ended between calls, which nobody has been told
        self._run: Run | None = None
        self._pid = 0
        self._shell: NamedShell | None = None
        self._pipe: Pipe | None = None
        self._before: dict[int, Process] = {}
        self._background: list[Pipe] = []

    @property
    def pids(self) -> list[int]:
        """The shells that are alive, and the command that runs."""
        pids = [shell.pid for shell in self._named.values()]
        return [*pids, self._pid] if self._pid else pids

    # --- performing

    def start(self, run: Run) -> None:
        self._run = run
        self._before = table()
        try:
            if run.call.get("shell") is None:
                self._start_command(run)
            else:
                self._start_in_shell(run, str(run.call["shell"]))
        except BaseException:
            self._run = None
            raise

    def rungs(self, run: Run) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
        return (lambda: self._interrupt(run), lambda: self._terminate(run), lambda: self._kill(run))

    def catch_up(self) -> None:
        if self._shell is not None:
            self._shell.hear()
        self._children.reap()

    def pause(self, run: Run, paused: bool) -> None:
        if self._pipe is not None and (run is self._run or not paused):
            self._pipe.pause(paused)

    # --- a command of its own

    def _start_command(self, run: Run) -> None:
        cmd = run.call["cmd"]
        words = [str(word) for word in cmd] if isinstance(cmd, list) else ["/bin/sh", "-c", str(cmd)]
        reader, writer = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid = self._spawner.program(
                words,
                descriptors=[null, writer, writer],
                environment={**self._config.environment, **_variables(run)},
                directory=self._directory(run) or self._config.data,
            )
        except SpawnError as error:
            os.close(reader)
            if error.errno not in (2, 13, 8, 20):  # no such file, not permitted, no program, not a directory
                raise
            self._cannot(run, error)
            return
        finally:
            os.close(null)
            os.close(writer)
        self._pid = pid
        self._pipe = Pipe(self._loop, reader, self._taker(run))
        self._children.expect(pid, lambda status, _peak: self._exited(run, pid, status))
        self._executions.began(run)

    def _cannot(self, run: Run, error: SpawnError) -> None:
        """As a shell would: 127 for what is not there, 126 for what cannot be run."""
        self._executions.began(run)
        self._executions.wrote(f"{error}\n".encode())
        self._finish(run, 127 if error.errno == 2 else 126)

    def _taker(self, run: Run) -> Callable[[bytes], None]:
        def take(data: bytes) -> None:
            if run is self._run:
                self._executions.wrote(data)
            else:
                self._executions.background(data)

        return take

    def _exited(self, run: Run, pid: int, status: int) -> None:
        if run is not self._run:
            return
        if run.why is not None:
            # What it had started is part of what was stopped.
            self._ender.end_below([pid])
        pipe = self._pipe
        if pipe is not None:
            pipe.drain()
            if not pipe.closed:
                self._keep_reading(pipe)
        self._pid = 0
        self._finish(run, _exit_code(status), status)

    def _keep_reading(self, pipe: Pipe) -> None:
        """Something it started still has its output."""
        pipe.pause(False)
        self._background = [old for old in self._background if not old.closed]
        self._background.append(pipe)
        if len(self._background) > _MAX_BACKGROUND_PIPES:
            self._background.pop(0).close()

    # --- a command in a named shell

    def _start_in_shell(self, run: Run, name: str) -> None:
        shell = self._named.get(name)
        if shell is None:
            shell = self._open(run, name)
            if name in self._died:
                del self._died[name]
                run.note(
                    f"The earlier shell {name!r} ended after its last call, and its directory, variables and jobs with"
                    " it; this one is new."
                )
        self._shell = shell
        self._pipe = shell.output
        shell.output.drain()
        self._executions.began(run)
        shell.run(str(run.call["cmd"]), self._directory(run), _variables(run))

    def _open(self, run: Run, name: str) -> NamedShell:
        if len(self._named) >= _MAX_SHELLS:
            raise SpawnError(11, f"there are {_MAX_SHELLS} named shells already; end one with `exit` in it")
        program = find_shell(self._config.environment)
        shell = NamedShell(self._config, self._loop, self._spawner, program, self._said, self._shell_wrote)
        self._named[name] = shell
        self._children.expect(shell.pid, lambda status, _peak: self._shell_died(name, shell, status))
        return shell

    def _shell_wrote(self, shell: NamedShell, data: bytes) -> None:
        if shell is self._shell and self._run is not None:
            self._executions.wrote(data)
        else:
            self._executions.background(data)

    def _said(self, shell: NamedShell, exit_code: int) -> None:
        run = self._run
        if run is None or shell is not self._shell:
            return
        shell.output.drain()
        self._finish(run, exit_code)

    def _shell_died(self, name: str, shell: NamedShell, status: int) -> None:
        run = self._run if shell is self._shell else None
        if run is not None and run.why is not None:
            self._ender.end_below([shell.pid])
        untaken = shell.untaken
        shell.output.drain()
        shell.close()
        if not shell.output.closed:
            self._keep_reading(shell.output)
        if self._named.get(name) is shell:
            del self._named[name]
        if run is not None and untaken:
            run.note(
                f"The shell {name!r} had ended before it took the command, which did not run; its directory, variables"
                " and jobs are gone, and the next call opens a new one."
            )
            self._finish(run, None, status)
        elif run is not None:
            run.note(
                f"The shell {name!r} has ended, and its directory, variables and jobs with it;"
                " the next call opens a new one."
            )
            self._finish(run, _exit_code(status), status)
        else:
            self._died[name] = None
            if len(self._died) > _MAX_SHELLS:
                del self._died[next(iter(self._died))]

    # --- its end

    def _finish(self, run: Run, exit_code: int | None, status: int = 0) -> None:
        """`exit_code`: None where it did not run."""
        run.exit_code = exit_code
        if run.why is not None:
            run.stopped("kept")
        elif status & 0x7F and self._shell is None:
            run.died(status, None, "kept")
        elif exit_code is None:
            run.ending = "never_started"
        else:
            run.ending = "ok" if exit_code == 0 else "raised"
        self._ender.adopt(self._before, [*self.pids, *self._ours()])
        self._run = None
        self._shell = None
        self._pipe = None
        self._executions.ended(run)

    def _interrupt(self, run: Run) -> None:
        if run is self._run:
            send_group(self._leader, signal.SIGINT)

    def _terminate(self, run: Run) -> None:
        """Harder: a command of its own is told to end; in a named shell what the command started is killed, so that
        the shell itself and its jobs, which ignore interrupts, live on."""
        if run is not self._run:
            return
        if self._shell is None:
            send_group(self._leader, signal.SIGTERM)
        else:
            self._ender.end_foreground(self._leader, self._before)

    def _kill(self, run: Run) -> None:
        if run is self._run:
            self._ender.end_below([self._leader])

    @property
    def _leader(self) -> int:
        return self._pid if self._shell is None else self._shell.pid

    def _directory(self, run: Run) -> str | None:
        directory = run.call.get("workdir")
        if not isinstance(directory, str) or not directory:
            return None
        return directory if directory.startswith("/") else f"{self._config.data}/{directory}"


def _variables(run: Run) -> dict[str, str]:
    env = run.call.get("env")
    return {str(key): str(value) for key, value in env.items()} if isinstance(env, dict) else {}


def _exit_code(status: int) -> int:
    """As shells count: 128 and the signal's number."""
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8
