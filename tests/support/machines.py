"""Several machines on this one, of namespaces: each has its own network, processes, /tmp, /run and /dev/shm.

    with Site() as site:
        a, b = site.machine("a"), site.machine("b")
        a.run(["ping", "-c1", b.address])
        server = b.popen([sys.executable, "-m", "http.server", "80"])
        b.processes()            # what runs in it: pid on this machine, pid inside, command line
        b.cut()                  # as a pulled cable: packets are lost, nobody is told
        b.mend()
        b.kill()                 # kill -9 of all its processes; its disk and its address stay
        b.boot()                 # with what is on its disk, and no processes

The machines share a segment of their own (10.111.0.0/24): a bridge in one more network namespace. Nothing of this
machine's own network is touched. Everything of the file system is visible in all of them and the same, but /tmp, /run
and /dev/shm, which are a machine's own; `site.shared` is a directory that all of them and the test see. Control groups
are this machine's. `machine.root` is its file system as the test sees it.

Every namespace is held by processes that end at the end of a pipe from the test: after a failure or `kill -9` of the
test nothing is left, and the kernel removes what the namespaces had.

Needs root, iproute2 and util-linux: `no_machines()` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import psutil

T = TypeVar("T")

INIT = Path(__file__).with_name("machine_init.py")
REPOSITORY = Path(__file__).parents[2]
SEGMENT = "10.111.0"
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount")
OWN = ("/tmp", "/run", "/dev/shm")  # of each machine; what is under them and needed is brought in
START_S = 20.0
END_S = 20.0
_CLONE_NEWNET = 0x40000000


@functools.cache
def no_machines() -> str | None:
    """None, or why this machine cannot be several."""
    if os.geteuid() != 0:
        return "machines made of namespaces need root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"machines made of namespaces need iproute2 and util-linux (missing: {', '.join(missing)})"
    probe = "ip link add type veth && ip link add type bridge && mount -t tmpfs none /tmp"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", probe],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.strip()[-200:]}"


@dataclass(frozen=True, slots=True)
class Process:
    """One that runs in a machine."""

    pid: int  # on this machine: for signals from the test
    inside: int  # in its own
    innermost: int  # in the namespace that it is in: 1 for the first process of a sandbox
    command: str


class Running:
    """A program in a machine, as `subprocess.Popen` would have it. `pid` is its pid on this machine."""

    def __init__(self, entered: subprocess.Popen[bytes]) -> None:
        self.entered = entered  # nsenter: waits for the program, and takes it along when it ends
        self.stdout: IO[bytes] | None = entered.stdout
        self.stderr: IO[bytes] | None = entered.stderr
        self.stdin: IO[bytes] | None = entered.stdin
        self.pid = 0
        deadline = time.monotonic() + START_S
        while self.pid == 0 and entered.poll() is None:
            assert time.monotonic() < deadline, "nsenter started nothing"
            with contextlib.suppress(psutil.NoSuchProcess):
                self.pid = next((child.pid for child in psutil.Process(entered.pid).children()), 0)

    def poll(self) -> int | None:
        return self.entered.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.entered.wait(timeout)

    @property
    def returncode(self) -> int | None:
        return self.entered.returncode

    def send_signal(self, number: int) -> None:
        """To the program, not to what started it. One that has ended is none."""
        if self.entered.poll() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Ends it, if it runs, and what is open of it."""
        self.kill()
        self.entered.wait(END_S)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()


class _Held:
    """Namespaces with a process that holds them, as long as this process wants."""

    def __init__(self, command: Sequence[str], *removed_at_its_end: Path) -> None:
        self._holder = subprocess.Popen(
            [*command, sys.executable, "-S", "-I", str(INIT), *map(str, removed_at_its_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        ready = self._holder.stdout.readline() == b"ready\n"
        assert ready, f"{' '.join(command)}: {self._holder.stderr.read().decode(errors='replace')}"
        self._holder.stdout.close()
        # unshare --fork and nsenter --pid wait for the process that is in the namespaces; the others became it
        children = psutil.Process(self._holder.pid).children()
        self.pid = children[0].pid if children else self._holder.pid

    def kill(self) -> None:
        """As one blow: when it is the first of a pid namespace the kernel ends all processes of it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(END_S)
        if self._holder.stderr is not None:
            self._holder.stderr.close()

    @property
    def alive(self) -> bool:
        return self._holder.poll() is None


class Machine:
    """One machine. Made by `Site.machine`, which boots it."""

    def __init__(self, site: Site, name: str, number: int) -> None:
        self.site = site
        self.name = name
        self.address = f"{SEGMENT}.{number}"
        self._port = f"port{number}"
        self._ground = _Held(["unshare", "--net", "--uts", "--mount", "--propagation", "private"])
        self._system: _Held | None = None
        self._running: list[Running] = []
        self._forwards: list[_Forward] = []
        self._build(number)
        self.boot()

    def _build(self, number: int) -> None:
        mac = f"02:00:0a:6f:00:{number:02x}"
        cable = (
            f"ip link add {self._port} type veth peer name eth0 address {mac} netns {self._ground.pid}"
            f" && ip link set {self._port} master switch && ip link set {self._port} up"
        )
        self.site.on_switch(cable)
        inside = [
            "set -e",
            f"hostname {self.name}",
            "ip link set lo up",
            f"ip address add {self.address}/24 dev eth0",
            "ip link set eth0 up",
        ]
        moves = []
        for count, place in enumerate(map(os.path.realpath, OWN)):
            new = self.site.directory / f"mount{count}"
            inside += [f"mkdir -p {new}", f"mount -n -t tmpfs -o mode=1777 machine {new}"]
            moves.append(f"mount -n --move {new} {place}")
            for path in self.site.visible:
                if path.is_relative_to(place):
                    to = new / path.relative_to(place)
                    make = f"mkdir -p {to}" if path.is_dir() else f"mkdir -p {to.parent} && touch {to}"
                    inside += [make, f"mount -n --rbind {path} {to}"]
        inside += reversed(moves)  # the test's directory may be in the first of them
        self._on_ground("\n".join(inside))

    def _on_ground(self, script: str) -> None:
        _run(["nsenter", f"--target={self._ground.pid}", "--net", "--uts", "--mount", "--", "sh", "-c", script])

    def boot(self) -> None:
        """Starts it with no processes but its first one; does nothing when it is up."""
        if self._system is not None:
            return
        self._system = _Held(
            [
                *("nsenter", f"--target={self._ground.pid}", "--net", "--uts", "--mount", "--"),
                *("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "--"),
            ]
        )
        # nsenter became unshare, which has the first process as its child

    @property
    def up(self) -> bool:
        return self._system is not None and self._system.alive

    @property
    def root(self) -> Path:
        """Its file system, as the test sees it. Its machine is up."""
        return Path(f"/proc/{self._first}/root")

    @property
    def _first(self) -> int:
        assert self._system is not None, f"machine {self.name} is not up"
        return self._system.pid

    def command(self, argv: Sequence[str], *, cwd: Path | str = REPOSITORY) -> list[str]:
        """A command line that runs this one in the machine. Its process ends when the one that started it ends."""
        enter = ["nsenter", f"--target={self._first}", "--net", "--uts", "--mount", "--pid", f"--wdns={cwd}", "--"]
        return [*enter, "setpriv", "--pdeathsig", "SIGKILL", "--", *map(str, argv)]

    def popen(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | str = REPOSITORY,
        **options: Any,
    ) -> Running:
        """Starts a program. `environment` is added to the test's own; `options` are those of `subprocess.Popen`."""
        options.setdefault("stdin", subprocess.DEVNULL)
        entered = subprocess.Popen(self.command(argv, cwd=cwd), env=_environment(environment), **options)
        running = Running(entered)
        self._running.append(running)
        return running

    def run(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | str = REPOSITORY,
        check: bool = True,
        timeout: float = 60.0,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end. With `check` an exit code but 0 fails with what it said."""
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, **options}
        command = self.command(argv, cwd=cwd)
        done = subprocess.run(command, env=_environment(environment), timeout=timeout, check=False, **options)
        assert not check or done.returncode == 0, (
            f"{self.name}: {argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def python(self, code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs Python code of this interpreter, as `run`."""
        return self.run([sys.executable, "-c", code, *arguments], **options)

    def processes(self) -> list[Process]:
        """All that runs in it, but its first process and what is only ending."""
        if not self.up:
            return []
        space = os.readlink(f"/proc/{self._first}/ns/pid")
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error, StopIteration):
                if pid != self._first and space in _spaces(pid):
                    status = Path(f"/proc/{pid}/status").read_text()
                    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
                    depth = _depth(self._first)
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command:
                        found.append(Process(pid, int(numbers[depth]), int(numbers[-1]), command.strip()))
        return found

    def kill(self) -> None:
        """`kill -9` of all its processes at once. Its disk, address and cable stay; `boot` starts it again."""
        for forward in self._forwards:
            forward.drop()
        if self._system is not None:
            self._system.kill()
            self._system = None
        for running in self._running:
            running.close()
        self._running.clear()

    def cut(self) -> None:
        """The cable is pulled, far away: what is sent is lost, and neither end is told."""
        self.site.on_switch(f"ip link set {self._port} nomaster")

    def mend(self) -> None:
        """The cable is in again."""
        self.site.on_switch(f"ip link set {self._port} master switch")

    def in_network(self, call: Callable[[], T]) -> T:
        """Runs a call in a thread of the test that is in this machine's network. Sockets made in it stay there."""
        return _in_network(self._first, call)

    def connection(self, port: int, timeout: float = 10.0, address: str = "127.0.0.1") -> socket.socket:
        """A connection of the test, from within the machine, to a port of it or of an address that it can reach."""
        return self.in_network(lambda: socket.create_connection((address, port), timeout))

    def forward(self, port: int) -> int:
        """A port of this machine's loopback that leads to the loopback of that one, for clients in the test itself."""
        forward = _Forward(self, port)
        self._forwards.append(forward)
        return forward.port

    def close(self) -> None:
        for forward in self._forwards:
            forward.close()
        self.kill()
        self._ground.close()


class Site:
    """Machines on one segment. A context manager: nothing of it is left at its end."""

    def __init__(self, shared: Path | None = None, visible: Sequence[Path] = ()) -> None:
        """`shared`: a directory of the test's that all machines see; none: one is made. `visible`: further paths."""
        self.directory = Path(tempfile.mkdtemp(prefix="site-"))
        self.shared = shared or self.directory / "shared"
        self.shared.mkdir(exist_ok=True)
        interpreter = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).parent]
        self.visible = [*dict.fromkeys([REPOSITORY, *interpreter, *_import_places(), self.shared, *visible])]
        self.machines: dict[str, Machine] = {}
        self._switch = _Held(["unshare", "--net"], self.directory)
        self.on_switch("ip link add switch type bridge && ip link set switch up")

    def machine(self, name: str) -> Machine:
        """A new machine, up."""
        assert name not in self.machines, f"there is a machine {name}"
        machine = Machine(self, name, 11 + len(self.machines))
        self.machines[name] = machine
        return machine

    def on_switch(self, script: str) -> None:
        """Runs a command where the segment's cables come together."""
        _run(["nsenter", f"--target={self._switch.pid}", "--net", "--", "sh", "-c", script])

    def close(self) -> None:
        for machine in self.machines.values():
            machine.close()
        self._switch.close()

    def __enter__(self) -> Site:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Forward:
    """Carries connections from this machine's loopback to one in a machine, each by two threads."""

    def __init__(self, machine: Machine, port: int) -> None:
        self._machine = machine
        self._to = port
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name=f"forward {machine.name}:{port}", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = self._machine.connection(self._to)
        except (OSError, AssertionError):
            client.close()
            return
        server.settimeout(None)
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {client, server}
        back = threading.Thread(target=_carry, args=(server, client), daemon=True)
        back.start()
        _carry(client, server)
        back.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def drop(self) -> None:
        """Ends all connections, as those to a machine that has just died do when it answers with a reset."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()


def _carry(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _in_network(pid: int, call: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            try:
                if _libc().setns(descriptor, _CLONE_NEWNET) != 0:  # of this thread alone
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(descriptor)
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where it was called
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _spaces(pid: int) -> Iterator[str]:
    """A process' pid namespace and those around it, up to this machine's."""
    descriptor = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
    try:
        while True:
            yield f"pid:[{os.fstat(descriptor).st_ino}]"
            parent = _parent(descriptor)
            os.close(descriptor)
            descriptor = parent
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _parent(descriptor: int) -> int:
    import fcntl

    return fcntl.ioctl(descriptor, 0xB702)  # NS_GET_PARENT of linux/nsfs.h; EPERM at the top


def _depth(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return len(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()) - 1


def _import_places() -> list[Path]:
    return [Path(place).resolve() for place in os.environ.get("PYTHONPATH", "").split(":") if place]


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(more or {})}


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command[-1]}\nended with {done.returncode}: {done.stderr}"
