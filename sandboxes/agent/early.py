"""The first interpreter, forked from the agent before that knows anything: it starts while the agent does, and shares
the memory of what both need. Later ones are executed anew (`python_process`).

Above: the launcher (forks), `python_process` (sends it off). Below: fork(2), `spawn`, `interpreter`.

Nothing of the agent's is in it: the fork comes before the configuration, with its secrets, is read, and every
descriptor but its own is closed first. Whoever asks for it (`CONFIG early`) has given up all privileges already, for
good (no_new_privs), as bubblewrap has. It runs none of user code before it has been told what an execution would have
given it: descriptors, environment, directory, limits. What cannot be given to a process that runs already (another
program, other users, variables that are read once at a start) is executed instead.
"""

from __future__ import annotations

import _socket
import os
import sys

from . import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from .config import Config

_DESCRIPTORS = 4  # /dev/null, the output pipe twice, the channel
_INT_BYTES = 4
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
        told, own = config.environment, os.environ
        names = {name for name in (*told, *own) if name.startswith(_AT_START)}
        alike = all(told.get(name) == own.get(name) for name in names)
        return alike and config.python == [sys.executable] and not config.drops and not config.seccomp

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


def fork(interpret: Callable[..., None]) -> Early | None:
    """`interpret`: the launcher's. None where no process can be started."""
    ours, theirs = _socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if pid == 0:
        _wait(theirs, interpret)
    theirs.close()
    return Early(pid, ours)


def _wait(channel: _socket.socket, interpret: Callable[..., None]) -> NoReturn:
    """In the child. Ends with it."""
    status = 1
    try:
        own = channel.fileno()
        os.closerange(3, own)
        os.closerange(own + 1, 1 << 20)
        os.setsid()
        from .interpreter import main  # while the agent reads its configuration

        told = _receive(channel)
        channel.close()
        if told is not None:
            from .lower import lower

            lower(told["limits"], told["data"])  # type: ignore[arg-type]
            environment: dict[str, str] = told["environment"]  # type: ignore[assignment]
            os.environ.clear()
            os.environ.update(environment)
            _set_time_zone(environment)
            os.chdir(told["data"])  # type: ignore[arg-type]
            interpret(main, 3, told["data"], told["sites"], told["modules"])
        status = 0
    except BaseException as error:  # noqa: BLE001 - nothing of the agent may run on in the child
        os.write(2, f"the interpreter did not start: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(status)


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


def _set_time_zone(environment: dict[str, str]) -> None:
    if "TZ" in environment:
        import time

        time.tzset()
