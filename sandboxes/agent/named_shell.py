"""A persistent shell: a real one, that reads its script from its standard input and says each command's exit code on
another descriptor.

Above: `shells`. Below: `spawn`. The commands themselves have neither: their input is empty. The script is read from
where it is, never opened by a name (`/dev/fd/N`): the pipe is the agent's, and user code may be another uid's.
"""

from __future__ import annotations

import fcntl
import sys

from .loop import READ, WRITE
from .pipes import FIONREAD, Pipe
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .loop import Loop
    from .spawn import Spawner

_COMMAND = "__toolhost_command"
_STATUS = 3
# An interrupt ends what runs and leaves loops, and the shell lives on. Commands get the default back, jobs ignore it.
_PRELUDE = "trap 'break 999 2>/dev/null' INT\n"
_SHELLS = ("bash", "sh")
_MAX_SAID = 64


def find_shell(environment: dict[str, str]) -> str:
    """bash where there is one, else sh."""
    for name in _SHELLS:
        for directory in environment.get("PATH", "/usr/bin:/bin").split(":"):
            path = f"{directory}/{name}"
            if os.access(path, os.X_OK):
                return path
    return "/bin/sh"


class NamedShell:
    """`on_said(shell, exit_code)` follows each command that does not end the shell. Raises SpawnError."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        spawner: Spawner,
        program: str,
        on_said: Callable[[NamedShell, int], None],
        on_output: Callable[[NamedShell, bytes], None],
    ) -> None:
        self._loop = loop
        self._on_said = on_said
        self._said = b""
        self._unsent = b""
        self._last_bytes = 0
        script, self._script = os.pipe()
        self._status, status = os.pipe()
        reader, writer = os.pipe()
        flags = ["--norc", "--noprofile"] if program.endswith("/bash") else []
        try:
            self.pid = spawner.program(
                [program, *flags, "-s"],
                descriptors=[script, writer, writer, status],
                environment=config.environment,
                directory=config.data,
            )
        except BaseException:
            for fd in (self._script, self._status, reader):
                os.close(fd)
            raise
        finally:
            for fd in (writer, script, status):
                os.close(fd)
        os.set_blocking(self._script, False)
        os.set_blocking(self._status, False)
        self.output = Pipe(loop, reader, lambda data: on_output(self, data))
        loop.watch(self._status, READ, self._hear)
        self._write(_PRELUDE)

    def run(self, command: str, directory: str | None, variables: dict[str, str]) -> None:
        """One command. The directory and the variables stay, as if they had been set in it."""
        before = " && ".join(
            [f"export {name}={quote(value)}" for name, value in variables.items() if name.isidentifier()]
            + ([f"cd -- {quote(directory)}"] if directory is not None else [])
            # From a variable: a syntax error in an `eval` of literal text upsets bash 5.2's parser for what follows.
            + [f'eval "${_COMMAND}"']
        )
        text = f"{_COMMAND}={quote(command)}\n"
        text += f"{{ {before}\n}} </dev/null {_STATUS}>&-\nprintf '%s\\n' \"$?\" >&{_STATUS}\n"
        self._last_bytes = len(text.encode("utf-8", "surrogateescape"))
        self._write(text)

    @property
    def untaken(self) -> bool:
        """Whether it has read nothing of the last command. Until `close`."""
        waiting = bytearray(4)
        try:
            fcntl.ioctl(self._script, FIONREAD, waiting)
        except OSError:  # a kernel that does not tell
            return False
        return 0 < self._last_bytes <= int.from_bytes(waiting, sys.byteorder) + len(self._unsent)

    def close(self) -> None:
        for fd in (self._status, self._script):
            if fd >= 0:
                self._loop.forget(fd)
                os.close(fd)
        self._status = self._script = -1

    def _write(self, text: str) -> None:
        self._unsent += text.encode("utf-8", "surrogateescape")
        self._flush(0)

    def _flush(self, _events: int) -> None:
        if self._script < 0:
            return
        try:
            sent = os.write(self._script, self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it is ending; its death is heard elsewhere
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.watch(self._script, WRITE, self._flush)
        else:
            self._loop.forget(self._script)

    def hear(self) -> None:
        """Takes in what it has said already."""
        if self._status >= 0:
            self._hear(0)

    def _hear(self, _events: int) -> None:
        try:
            data = os.read(self._status, 4096)
        except BlockingIOError:
            return
        if not data:
            self._loop.forget(self._status)
            return
        self._said = (self._said + data)[-_MAX_SAID:]
        if self._said.endswith(b"\n"):
            said, self._said = self._said.strip().rpartition(b"\n")[2], b""
            self._on_said(self, int(said) if said.isdigit() and len(said) < 4 else 1)


def quote(text: str) -> str:
    """One word for a POSIX shell."""
    return "'" + text.replace("'", "'\\''") + "'"
