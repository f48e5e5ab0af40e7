"""Starts bubblewrap and everything up to the agent having read its configuration.

Above: `bwrap_sandboxes`. Below: the program, and the host's processes. Everything here blocks, within a deadline, and
runs in threads of the backend.

Bubblewrap names the sandbox's PID 1 before it lets anything run in it (`--info-fd`, `--block-fd`), so that PID 1 is in
its control group, has its limits and is on record before the agent's first instruction. A host that dies in between
closes the pipe and the configuration: the agent then starts without one, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict

from sandboxes.backends.bwrap_system import USER
from sandboxes.backends.cgroups import AGENT_PROCESSES
from sandboxes.backends.pidfd import Process
from sandboxes.errors import EngineUnavailable, IsolationUnavailable, NoCapacity
from sandboxes.spec import Limits

NAMESPACES = (
    "--unshare-user",
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup",
    "--disable-userns",
    *("--uid", str(USER), "--gid", str(USER)),
    *("--hostname", "sandbox"),
    "--clearenv",
    "--as-pid-1",
    "--new-session",
)
# To remove files of user code: as the uid that they belong to, with rights over all of its own files.
REMOVER = (
    *("--unshare-all", "--uid", "0", "--gid", "0", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"),
    *("--cap-drop", "ALL", "--cap-add", "CAP_DAC_OVERRIDE"),
    "--as-pid-1",  # else its PID 1 is left behind for the machine's init to reap
    "--die-with-parent",
)
KILL_S = 10.0
LOG_TAIL = 2000
# What bubblewrap says (strerror) when the machine, and not its configuration, is at an end.
EXHAUSTED = ("Resource temporarily unavailable", "No space left on device", "Cannot allocate memory", "Too many open")


class Cancelled(Exception):
    """The launch was given up; the thread cleans up and ends."""


class Cancel:
    """Lets a thread that waits be told to give up."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._flag = threading.Event()

    def set(self) -> None:
        self._flag.set()
        os.eventfd_write(self.descriptor, 1)

    def check(self) -> None:
        """Raises Cancelled."""
        if self._flag.is_set():
            raise Cancelled

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Patience:
    """Until when to wait (of `time.monotonic`), and what ends it before."""

    deadline: float
    cancel: Cancel

    def readable(self, descriptor: int) -> None:
        """Waits until there is something to read, or its end. Raises Cancelled, EngineUnavailable."""
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.register(self.cancel.descriptor, select.POLLIN)
        left = self.deadline - time.monotonic()
        ready = poller.poll(left * 1000) if left > 0 else []
        self.cancel.check()
        if not ready:
            raise EngineUnavailable("the sandbox did not start in time; the machine may be overloaded, try again")


# The context in which a program is started, and the uid that it is still to be given there, if any.
Birth = AbstractContextManager[int | None]


class _Identity(TypedDict, total=False):
    """Of `subprocess`."""

    user: int
    group: int
    extra_groups: Sequence[int]


def _identity(uid: int | None) -> _Identity:
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": ()}


@dataclass(slots=True)
class Bubblewrap:
    """A started bubblewrap whose sandbox is still held back."""

    outer: subprocess.Popen[bytes]
    init: Process
    _gate: int

    def release(self) -> None:
        """Lets the command begin. Raises OSError."""
        gate, self._gate = self._gate, -1
        try:
            os.write(gate, b"1")
        finally:
            os.close(gate)

    def abandon(self) -> None:
        """Kills it, whatever state it is in, and waits. Never raises."""
        self.init.kill(KILL_S)
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1
        end(self.outer)


def end(outer: subprocess.Popen[bytes]) -> None:
    """Waits for the outer process, which ends by itself after PID 1; kills it if it does not. Never raises."""
    try:
        outer.wait(1.0)
    except subprocess.TimeoutExpired:
        outer.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            outer.wait(KILL_S)


@contextlib.contextmanager
def _pipe() -> Iterator[list[int]]:
    """Both ends; those that are still in the list at the end are closed."""
    ends = list(os.pipe2(os.O_CLOEXEC))
    try:
        yield ends
    finally:
        for descriptor in ends:
            os.close(descriptor)


def start(
    program: Path, arguments: Sequence[str], birth: Birth, *, fds: Sequence[int], log: IO[bytes], patience: Patience
) -> Bubblewrap:
    """Starts `program` (bubblewrap) with `arguments` (its own, `--` and the command).

    Raises IsolationUnavailable, NoCapacity, EngineUnavailable, Cancelled, OSError; nothing of it then runs.
    """
    with _pipe() as info, _pipe() as gate:
        # It also holds the reading end of its own pipe: were the host to die now, a broken pipe would end it before
        # it has told its child to go on, and the child would wait for ever.
        held = ("--info-fd", str(info[1]), "--sync-fd", str(info[0]), "--block-fd", str(gate[0]))
        with birth as uid:
            outer = subprocess.Popen(
                [str(program), *held, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={},
                cwd="/",
                pass_fds=(*info, gate[0], *fds),
                start_new_session=True,
                **_identity(uid),
            )
        try:
            os.close(info.pop())
            os.close(gate.pop(0))
            init = Process.of(_child_pid(info[0], patience))
        except BaseException as error:
            _kill_all(outer, info[0])
            if isinstance(error, EOFError | ValueError | ProcessLookupError):
                raise failure(Path(log.name)) from None
            raise
        return Bubblewrap(outer, init, gate.pop())


def _child_pid(descriptor: int, patience: Patience) -> int:
    """Raises EOFError when bubblewrap ended before it had made a child."""
    text = b""
    while b"}" not in text:
        patience.readable(descriptor)
        piece = os.read(descriptor, 4096)
        if not piece:
            raise EOFError
        text += piece
    return int(json.loads(text)["child-pid"])


def _kill_all(outer: subprocess.Popen[bytes], info: int) -> None:
    """Kills bubblewrap and its child. The child is in its process group until shortly before the command; if it has
    left that, its pid has been written to `info`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(outer.pid, signal.SIGKILL)
    outer.wait()
    os.set_blocking(info, False)
    with contextlib.suppress(BlockingIOError, ValueError, KeyError, ProcessLookupError):
        Process.of(int(json.loads(os.read(info, 4096))["child-pid"])).kill(KILL_S)


def deliver(configuration: bytes, channel: socket.socket, patience: Patience) -> None:
    """Sends the agent its configuration and waits until it has read it and closed its end.

    Raises ProcessLookupError when it has ended instead; EngineUnavailable, Cancelled, OSError.
    """
    channel.settimeout(max(0.1, patience.deadline - time.monotonic()))
    try:
        channel.sendall(configuration)
        channel.shutdown(socket.SHUT_WR)
        patience.readable(channel.fileno())
        channel.recv(1)
    except (BrokenPipeError, ConnectionResetError):  # closed with something unread
        raise ProcessLookupError("the agent did not read its configuration") from None


def failure(log: Path) -> Exception:
    """The error for a bubblewrap or an agent that ended at once, with what it said."""
    said = tail(log)
    if any(text in said for text in EXHAUSTED):
        return NoCapacity(f"the machine cannot start another sandbox now: {said}")
    return IsolationUnavailable(said or "the sandbox ended at once and said nothing")


def tail(log: Path) -> str:
    """The end of what bubblewrap and the agent wrote, for people."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def limit(pid: int, limits: Limits, *, processes: bool) -> None:
    """Gives a process its limits, from outside; the calling thread is of its uid, or may limit any. Raises OSError.

    An ordinary user's limit of processes has to be set so: what is set before the user namespace is made also holds
    for the sum of all namespaces. `processes`: whether this kernel counts them for each.
    """
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits.disk_bytes,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: limits.open_files,
    }
    if processes:
        wanted[resource.RLIMIT_NPROC] = limits.processes + AGENT_PROCESSES
    for number, value in wanted.items():
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)  # never more than the host's own
        resource.prlimit(pid, number, (value, value))


def run(command: Sequence[str], birth: Birth, timeout_s: float) -> str:
    """Runs a short command to its end; what it wrote. Raises EngineUnavailable when it fails, OSError."""
    with birth as uid:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={},
            cwd="/",
            **_identity(uid),
        )
    with process:
        try:
            written, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise EngineUnavailable(f"{Path(command[0]).name} did not end within {timeout_s:.0f} s") from None
            raise
    said = written[-LOG_TAIL:].decode(errors="replace").strip()
    if process.returncode != 0:
        raise EngineUnavailable(said or f"exit code {process.returncode}")
    return said
