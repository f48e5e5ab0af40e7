"""A Ray node on this machine: started by Ray's own command, on record in the state directory, and stopped alone.

Above: `cli.cluster`. Below: the command `ray start`, in a process of its own that takes its node along when it ends.
What else of Ray runs on this machine is left alone: the node's files have a directory of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sandboxes.backends.pidfd import Process, ended
from toolhost import interrupts
from toolhost.config import split_address
from toolhost.errors import ToolhostError

READY = "Ray runtime started"
START_S = 90.0
TRIES = 3
STOP_S = 30.0
REACHED_S = 5.0
LOG_BYTES = 1 << 16
OBJECT_STORE_BYTES = 100_000_000  # sessions use none; Ray's least is 75 MB
AT_ONCE = "toolhost: ended at once; `toolhost cluster down` ends what may be left"
SOCKET_CHARACTERS = 40  # of the directory, so that the paths of Ray's sockets in it stay under the system's limit

# A dead node is noticed within 3 s, a lost link within 6 s; nodes and drivers outlive a head that is away for an hour.
# docs/cluster.md has the effect of each. What stands in the environment wins.
DEFAULTS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "5",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class NodeProblem(ToolhostError):
    """A node could not be started or stopped. The message says what to do."""


class JoinedLate(NodeProblem):
    """Ray gives a node 30 s to join, and this one was slower: worth another try."""


class HeadUnreachable(NodeProblem):
    """No head answers at the address."""


class TokenRefused(NodeProblem):
    """The head has another token."""


class VersionsDiffer(NodeProblem):
    """The head has another Ray or Python."""


@dataclass(frozen=True, slots=True)
class Node:
    """What `up` started on this machine."""

    process: Process
    address: str  # of the head, HOST:PORT
    head: bool
    sessions: int  # that may run here
    token_file: str
    log: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `up` is to start. `address`: of the head, None to be it."""

    address: str | None
    port: int
    sessions: int
    token_file: Path
    resources: Mapping[str, float]
    node_address: str | None = None
    redis: str | None = None
    redis_password: str | None = None


class NodeRecord:
    """The node's file in a state directory. One node a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir / "cluster"
        self._file = self.directory / "node.json"

    def load(self) -> Node | None:
        """The node that is on record, also one that has ended. Raises NodeProblem when it cannot be read."""
        try:
            data = json.loads(self._file.read_text())
            return Node(**{**data, "process": Process(**data["process"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise NodeProblem(f"{self._file} cannot be read ({error}); if no node runs here, delete it") from None

    def save(self, node: Node) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(node)))
        temporary.replace(self._file)

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)


def own_address() -> str:
    """This machine's address as others on its network see it: that of its default route, else of its name.

    Nothing is sent. Raises NodeProblem.
    """
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # documentation's own
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127."):
            return found
    raise NodeProblem("this machine's address is not known; give the one that the other machines reach: --node-address")


def token(file: Path, *, make: bool) -> None:
    """Sees to it that there is a token, which with `make` is made when there is none. Raises NodeProblem."""
    try:
        if make and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                opened.write(secrets.token_hex(32))
        held = file.read_text().strip()
        mode = file.stat().st_mode
    except FileNotFoundError:
        raise NodeProblem(
            f"there is no token in {file}: copy the head's there (on the head: toolhost cluster status), mode 0600"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise NodeProblem(f"the token in {file} cannot be used: {error}") from None
    if not held:
        raise NodeProblem(f"the token in {file} is empty: copy the head's there")
    if mode & 0o077:
        raise NodeProblem(f"others can read the token in {file}: chmod 600 {file}")


def start(wanted: Wanted, record: NodeRecord) -> Node:
    """Starts Ray on this machine; returns when its node has joined. Nothing is left when it raises or is interrupted.

    Raises NodeProblem, HeadUnreachable, TokenRefused, VersionsDiffer.
    """
    own = wanted.node_address or _address_towards(wanted.address)
    address = wanted.address or _joined(own, wanted.port)
    if wanted.address is None:
        _free(own, wanted.port)
    for _ in range(TRIES - 1):
        with contextlib.suppress(JoinedLate):
            return _started(wanted, record, own, address)
    return _started(wanted, record, own, address)


def _started(wanted: Wanted, record: NodeRecord, own: str, address: str) -> Node:
    log = record.directory / "ray.log"
    offset = log.stat().st_size if log.exists() else 0
    command, variables = _command(wanted, own, _place(record.directory)), environment(wanted)
    signals = _Interrupts()
    signals.held = True  # until it is known what would have to be ended
    with interrupts.first(signals.came, signal.SIGTERM, left=AT_ONCE):
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=variables,
            )
        try:
            signals.release()
            node = Node(
                process=Process.of(process.pid),
                address=address,
                head=wanted.address is None,
                sessions=wanted.sessions,
                token_file=str(wanted.token_file),
                log=str(log),
            )
            record.save(node)
            _until_ready(process, log, offset, address)
        except BaseException:
            signals.held = True
            _end(process)
            record.remove()
            raise
    return node


class _Interrupts:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt, which waits while they are `held`."""

    def __init__(self) -> None:
        self.held = False
        self._came = False

    def release(self) -> None:
        self.held = False
        if self._came:
            raise KeyboardInterrupt

    def came(self) -> None:
        self._came = True
        if not self.held:
            raise KeyboardInterrupt


def stop(node: Node) -> bool:
    """Ends what `start` started, in order, then by force. False when it had ended before. Raises NodeProblem."""
    with node.process.opened() as descriptor:
        if descriptor is None:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if ended(descriptor, STOP_S):
            return True
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)  # Ray's reaper ends the others then
        if not ended(descriptor, STOP_S):
            raise NodeProblem(f"process {node.process.pid} does not end; see {node.log}")
    return True


def environment(wanted: Wanted) -> dict[str, str]:
    """Of Ray's processes on this machine."""
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wanted.token_file.absolute())}
    if wanted.redis is not None:
        own["RAY_REDIS_ADDRESS"] = wanted.redis
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_TOKEN", "RAY_ADDRESS")}
    return {**DEFAULTS, **inherited, **own}


def _command(wanted: Wanted, own: str, place: Path) -> list[str]:
    if wanted.address is None:
        role = ["--head", f"--port={wanted.port}", "--include-dashboard=false"]
        if wanted.redis_password is not None:  # Ray itself has it in its processes' arguments
            role.append(f"--redis-password={wanted.redis_password}")
    else:
        role = [f"--address={wanted.address}"]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", *role, "--block"),
        *(f"--node-ip-address={own}", "--num-cpus=0", "--num-gpus=0"),
        *(f"--resources={json.dumps(dict(wanted.resources))}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
        *(f"--temp-dir={place}", "--include-log-monitor=false", "--disable-usage-stats", "--log-color=false"),
    ]


def _place(directory: Path) -> Path:
    """Ray's own directory: with the state, or where that is too long for the paths of sockets, in a short one."""
    place = directory / "ray"
    if len(str(place)) > SOCKET_CHARACTERS:
        place = Path(f"/tmp/toolhost-ray-{os.getuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if found.st_uid != os.getuid() or place.is_symlink():
        raise NodeProblem(f"{place} is not this user's; delete it, or give a shorter --state-dir")
    return place


def _until_ready(process: subprocess.Popen[bytes], log: Path, offset: int, address: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        ended_with = process.poll()
        said = _said(log, offset)
        if ended_with is not None:
            raise _why(said, log, address)
        if READY in said:
            return
        if time.monotonic() > deadline:
            raise NodeProblem(f"Ray did not start within {START_S:.0f} s; see {log}")
        time.sleep(0.05)


def _said(log: Path, offset: int) -> str:
    with log.open("rb") as opened:
        opened.seek(max(offset, log.stat().st_size - LOG_BYTES))
        return opened.read().decode(errors="replace")


def _why(said: str, log: Path, address: str) -> NodeProblem:
    if "Version mismatch" in said:
        versions = [" ".join(found) for found in re.findall(r"(Ray|Python): (\S+)", said.split("Version mismatch")[-1])]
        theirs, ours = ", ".join(versions[:2]), ", ".join(versions[2:4])
        return VersionsDiffer(
            f"the head at {address} has {theirs}, this machine {ours}: they must be the same on every machine"
        )
    if "InvalidAuthToken" in said or "AuthenticationError" in said:
        return TokenRefused(
            f"the head at {address} refused the token: copy the head's token file here (on the head: toolhost cluster "
            "status names it)"
        )
    if "Failed to connect to GCS" in said or "GCS server is not ready" in said:
        return HeadUnreachable(f"no head answers at {address}; is it up there (toolhost cluster up --head)?")
    if "timed out during startup" in said:
        return JoinedLate(f"Ray on this machine did not join within its 30 s, {TRIES} times: it is too busy; see {log}")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return NodeProblem(f"Ray did not start: {lines[-1][:300] if lines else 'it said nothing'}; all of it is in {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def reach(address: str) -> None:
    """Raises HeadUnreachable when nothing listens at the head's address."""
    try:
        with socket.create_connection(split_address(address), REACHED_S):
            pass
    except OSError as error:
        raise HeadUnreachable(
            f"no head is reached at {address} ({error.strerror or error or 'no answer'}): is it up there (toolhost "
            "cluster up --head), and is the port open to this machine?"
        ) from None


def _address_towards(head: str | None) -> str:
    """This machine's address that the head sees."""
    if head is None:
        return own_address()
    reach(head)
    with _connected(head) as connection:
        return str(connection.getsockname()[0])


@contextlib.contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    try:
        with socket.create_connection(split_address(address), REACHED_S) as connection:
            yield connection
    except OSError as error:
        raise HeadUnreachable(f"no head is reached at {address}: {error}") from None


def _free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise NodeProblem(
                f"{_joined(host, port)} cannot be listened on ({error.strerror or error}): give another --port, or the "
                "address of this machine with --node-address"
            ) from None


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
