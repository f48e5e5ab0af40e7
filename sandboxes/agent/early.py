"""The first interpreter, started before the agent knows anything of its own: both get ready side by side. Later ones
are started when they are needed (`python_process`).

Above: the launcher (starts it, and is what it runs), `python_process` (sends it off). Below: fork(2), exec(3), `lower`,
`interpreter`.

It is executed, beside the agent's own start, or forked from the agent, which takes less memory and lets many start
sooner, where all that the agent's Python has loaded by then is known. Either comes before the agent reads its
configuration, with its secrets, and every descriptor but its own is closed first. So nothing of the agent's is in it.
It runs none of user code before it has been told what a later one is given at its start: descriptors, environment,
directory, limits, uid. What cannot be given to a process that runs already (another program, variables that are read
once at a start) is started anew instead. Who starts the agent so (`CONFIG early` or `CONFIG fork`) has set
no_new_privs.
"""

from __future__ import annotations

import _socket
import posix
import sys

from . import wire
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from .config import Config

    Interpreter = Callable[[], Callable[[int, str, list[str], list[str]], None]]

_DESCRIPTORS = 4  # /dev/null, the output pipe twice, the channel
_INT_BYTES = 4
_CHANNEL = 3
_MOST_BYTES = 1 << 20
# Read by the C library when a process starts. (Python itself reads none of its own: it is isolated, -I.)
_AT_START = ("LC_", "LANG", "MALLOC_", "GLIBC_", "LD_")


class Early:
    """The agent's end."""

    def __init__(self, pid: int, channel: _socket.socket) -> None:
        self.pid = pid
        self._channel = channel

    @staticmethod
    def fits(config: Config) -> bool:
        """Whether an interpreter of this configuration can be had without executing one."""
        told = config.environment
        own = {_text(name): _text(value) for name, value in posix.environ.items()}
        names = {name for name in (*told, *own) if name.startswith(_AT_START)}
        if any(told.get(name) != own.get(name) for name in names):
            return False
        if config.python == [sys.executable.rpartition("/")[2]]:
            return told.get("PATH") == own.get("PATH")
        return config.python == [sys.executable]

    def send_off(
        self, config: Config, limits: list[tuple[int, int]], preimports: list[str], descriptors: list[int]
    ) -> bool:
        """Makes it the interpreter; False when it is gone. `descriptors`: /dev/null, the output twice, the channel."""
        frame = wire.encode(
            {
                "environment": config.environment,
                "data": config.data,
                "sites": config.site,
                "modules": preimports,
                "limits": [list(limit) for limit in limits],
                "identity": config.identity,
                "filter": config.filter,
            }
        )
        rights = b"".join([fd.to_bytes(_INT_BYTES, sys.byteorder) for fd in descriptors])
        try:
            self._channel.sendmsg([frame[:1]], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
            self._channel.sendall(frame[1:])
        except OSError:
            return False
        finally:
            self._channel.close()
        return True

    def dismiss(self) -> None:
        """It is not wanted: it ends by itself when this end is closed."""
        self._channel.close()


def _text(part: bytes) -> str:
    return part.decode("utf-8", "surrogateescape")


def execute(launcher: str) -> Early | None:
    """Starts it as a program of its own. None where no process can be started."""
    return _beside(lambda channel: _become(channel, launcher))


def fork(interpreter: Interpreter) -> Early | None:
    """Forks it from this process, which nothing that user code may not see has been told yet. `interpreter`: the
    launcher's. None where no process can be started."""
    import gc

    gc.freeze()  # else every collection, here and there, writes to what both have from before
    return _beside(lambda channel: _split_off(channel, interpreter))


def _beside(begin: Callable[[int], NoReturn]) -> Early | None:
    """`begin`: called in the child, with its end of the channel."""
    ours, theirs = _socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if pid == 0:
        ours.detach()  # all but one are closed by number
        begin(theirs.detach())
    theirs.close()
    return Early(pid, ours)


def _become(channel: int, launcher: str) -> NoReturn:
    """In the child: only the channel, as 3, and what says why a program did not start, go with it."""
    try:
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)  # what comes from stdin is the agent's
        os.dup2(channel, _CHANNEL)
        os.set_inheritable(_CHANNEL, True)
        os.closerange(_CHANNEL + 1, 1 << 20)
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-I", "-B", launcher, "early"])
    finally:
        os._exit(127)


def _split_off(channel: int, interpreter: Interpreter) -> NoReturn:
    """In the child: nothing of the agent's stays open. What is raised here ends it as it ends a program."""
    os.dup2(channel, _CHANNEL)
    os.closerange(_CHANNEL + 1, 1 << 20)
    os.setsid()
    wait(interpreter)
    sys.exit()


def wait(interpreter: Interpreter) -> None:
    """The new process: becomes an interpreter when it is told to, and then never returns. `interpreter`: the
    launcher's."""
    interpret = interpreter()  # while the agent reads its configuration
    told = _receive(_socket.socket(fileno=_CHANNEL))
    if told is None:
        return
    from .lower import lower

    _refuse_calls(str(told["filter"]))
    lower(told["limits"], told["data"], told["identity"])  # type: ignore[arg-type]
    if told["identity"] is not None:
        from . import kernel

        kernel.show()  # as what is executed after that is
    environment: dict[str, str] = told["environment"]  # type: ignore[assignment]
    import os as whole

    whole.environ.clear()
    whole.environ.update(environment)
    _set_time_zone(environment)
    os.chdir(told["data"])  # type: ignore[arg-type]
    interpret(3, told["data"], told["sites"], told["modules"])  # type: ignore[arg-type]


def _receive(channel: _socket.socket) -> dict[str, object] | None:
    """What the agent tells, its descriptors at 0 to 3; None when it wants no interpreter."""
    data, ancillary, _flags, _address = channel.recvmsg(1 << 16, _socket.CMSG_SPACE(_DESCRIPTORS * _INT_BYTES))
    fds: list[int] = []
    for level, kind, rights in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            fds += [
                int.from_bytes(rights[at : at + _INT_BYTES], sys.byteorder) for at in range(0, len(rights), _INT_BYTES)
            ]
    while data and not data.endswith(b"\n") and len(data) < _MOST_BYTES:
        piece = channel.recv(1 << 16)
        if not piece:
            return None
        data += piece
    if len(fds) != _DESCRIPTORS or not data.endswith(b"\n"):
        return None
    channel.close()
    from .lower import rearrange

    rearrange(fds)
    return wire.parse(data)


def _refuse_calls(program: str) -> None:
    """What the agent does to itself, where the backend does not do it for both."""
    if program:
        import binascii

        from . import kernel

        kernel.no_new_privileges()
        kernel.refuse_calls(binascii.a2b_base64(program))


def _set_time_zone(environment: dict[str, str]) -> None:
    if "TZ" in environment:
        import time

        time.tzset()
