"""What a sandbox's container is: its labels, its limits, and what of the host it sees. Pure: no call is made here.

Above: `docker`. Below: the engine's API (https://docs.docker.com/reference/api/engine/), as plain data.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.agent import wire
from sandboxes.backends.tmpfs import LEAST_BYTES, SPARE_BYTES, tmpfs_options, tmpfs_sizes
from sandboxes.errors import IsolationUnavailable
from sandboxes.owner import Owner
from sandboxes.spec import Handle, Limits, SandboxSpec

NAME = "docker"

# Inside.
DATA = "/mnt/data"
AGENT = "/opt/toolhost/agent"
AGENT_MAIN = f"{AGENT}/toolhost_agent.py"
CHANNEL = "/run/toolhost"
SOCKET = "channel"

LABEL = "org.toolhost."
# Fewer cannot drop to another uid, or kill what runs as one.
CAPABILITIES = ("KILL", "SETGID", "SETUID")
# The control group counts the agent and its workers too; the limit is about user code.
SPARE_PROCESSES = 8
# A runtime with a kernel of its own runs it as processes and threads of the machine, several for each inside, and dies
# when it gets none: there the kernel inside holds the limit (RLIMIT_NPROC), and the control group only a loose one.
SENTRY_PROCESSES = 512
SENTRY_FACTOR = 4
# tmpfs pages count as the container's memory and cannot be reclaimed: a full one must leave PID 1 this much.
SMALLEST_BYTES = SPARE_BYTES + LEAST_BYTES
MAX_CONFIGURATION = 60_000  # what a pipe holds, and some
VARIABLES = {"HOME": DATA, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "user", "MPLBACKEND": "Agg"}
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Place:
    """Host paths that one sandbox is given. `channel` is None where the attach stream carries the frames."""

    agent: Path
    data: Path
    channel: Path | None


@dataclass(frozen=True, slots=True)
class Identity:
    """What one launch is called, and who its user code is."""

    key: str
    sandbox_id: str
    workspace: str
    created_at: float
    uid: int


def container_name(owner: Owner, key: str) -> str:
    """One of a kind on an engine: a second launch of a key fails there, whoever makes it."""
    return f"toolhost-{owner.id}-{key}"


def labels(owner: Owner, identity: Identity) -> dict[str, str]:
    """What adoption needs to know, and people look for."""
    return {
        f"{LABEL}owner": owner.id,
        f"{LABEL}purpose": "sandbox",
        f"{LABEL}version": str(wire.VERSION),
        f"{LABEL}key": identity.key,
        f"{LABEL}sandbox": identity.sandbox_id,
        f"{LABEL}workspace": identity.workspace,
        f"{LABEL}created": f"{identity.created_at:.3f}",
    }


def owner_filter(owner: Owner) -> list[str]:
    """For a list of this owner's containers."""
    return [f"{LABEL}owner={owner.id}", f"{LABEL}purpose=sandbox"]


def handle_of(container: str, found: Mapping[str, str]) -> Handle:
    """The handle that a container's labels describe. Raises KeyError, ValueError for one that is not ours."""
    return Handle(
        backend=NAME,
        key=found[f"{LABEL}key"],
        sandbox_id=found[f"{LABEL}sandbox"],
        instance=container,
        workspace=found[f"{LABEL}workspace"],
        created_at=float(found[f"{LABEL}created"]),
    )


def configuration(
    owner: Owner,
    identity: Identity,
    spec: SandboxSpec,
    *,
    search_path: str,
    attached: bool,
    own_kernel: bool,
    seccomp: bytes | None,
    times: tuple[float, float, float | None],
) -> bytes:
    """What the agent reads from stdin: its configuration (see the end of `wire`) with its length before it."""
    timeout_s, grace_s, fence_s = times
    limits = spec.limits
    text = json.dumps(
        {
            "sandbox": identity.sandbox_id,
            "owner": owner.id,
            "nonce": owner.nonce(identity.sandbox_id),
            "channel": {"kind": "stdio"} if attached else {"kind": "listen_path", "path": f"{CHANNEL}/{SOCKET}"},
            "peer_check": True,
            "data": DATA,
            "python": ["python3"],
            "site": [],
            "uid": identity.uid,
            "gid": identity.uid,
            "environment": {"PATH": search_path, **VARIABLES, **spec.environment},
            "preimports": list(spec.preimports),
            "limits": {
                # The container's control group holds memory and processes; on a shared kernel RLIMIT_NPROC would
                # count the processes of every container that happens to have this uid.
                "memory_bytes": limits.memory_bytes,
                "memory_rlimit": False,
                "disk_bytes": limits.disk_bytes,
                "processes": limits.processes if own_kernel else None,
                "open_files": limits.open_files,
            },
            # On top of the engine's profile, which older engines have let sockets of virtual machines and io_uring by.
            "seccomp": b64encode(seccomp or b"").decode(),
            "timeout_s": timeout_s,
            "grace_s": grace_s,
            "fence_s": fence_s,
        }
    ).encode()
    if len(text) > MAX_CONFIGURATION:
        raise IsolationUnavailable(f"the sandbox's environment variables are too large ({len(text)} bytes)")
    return f"{len(text):08d}".encode() + text


def creation(
    image: str,
    identity: Identity,
    spec: SandboxSpec,
    place: Place,
    owner: Owner,
    *,
    runtime: str | None,
    own_kernel: bool,
    network: str,
) -> dict[str, Any]:
    """The body of the engine's "create a container". The default seccomp profile applies because none is named;
    the agent adds its own filter to it (see `configuration`). Raises IsolationUnavailable."""
    if spec.limits.memory_bytes < SMALLEST_BYTES:
        raise IsolationUnavailable(
            f"a memory limit of {spec.limits.memory_bytes >> 20} MiB leaves no room for a sandbox: "
            f"set at least {SMALLEST_BYTES >> 20} MiB"
        )
    tmp_bytes, shm_bytes = tmpfs_sizes(spec.limits)

    def in_memory(size: int) -> str:
        return f"rw,noexec,nosuid,nodev,{tmpfs_options(size)}"

    attached = place.channel is None
    mounts = [mount(place.agent, AGENT, read_only=True), mount(place.data, DATA)]
    if place.channel is not None:
        mounts.append(mount(place.channel, CHANNEL))
    return {
        "Image": image,
        # The configuration holds the nonce, so it comes neither as an argument nor in the environment, which `docker
        # inspect` shows, and leaves no file.
        "Entrypoint": ["python3", "-I", "-B", "-S", AGENT_MAIN],
        "Cmd": ["stdin", "early"],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Labels": labels(owner, identity),
        "OpenStdin": True,
        # The configuration is all that stdin brings, unless it carries the frames, and then for every host after.
        "StdinOnce": not attached,
        "AttachStdin": True,
        "AttachStdout": attached,
        "AttachStderr": attached,
        "Tty": False,
        "Healthcheck": {"Test": ["NONE"]},
        "NetworkDisabled": network == "none",
        "HostConfig": {
            "NetworkMode": network,
            "ReadonlyRootfs": True,
            "Tmpfs": {"/tmp": in_memory(tmp_bytes), "/dev/shm": in_memory(shm_bytes)},
            "ShmSize": shm_bytes,
            "Mounts": mounts,
            "CapDrop": ["ALL"],
            "CapAdd": list(CAPABILITIES),
            "SecurityOpt": ["no-new-privileges:true"],
            "Privileged": False,
            "Memory": spec.limits.memory_bytes,
            "MemorySwap": spec.limits.memory_bytes,  # memory and swap together: so no swap
            "MemorySwappiness": None,
            "NanoCpus": int(spec.limits.cpus * 1e9),
            "PidsLimit": _host_processes(spec.limits, own_kernel),
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "Init": False,
            "RestartPolicy": {"Name": "no"},
            # With the attach stream the log would be every frame: output of user code, kept on the engine's disk.
            "LogConfig": {"Type": "none", "Config": {}}
            if attached
            else {"Type": "json-file", "Config": {"max-size": "256k", "max-file": "1"}},
            **({"Runtime": runtime} if runtime else {}),
        },
    }


def mount(place: Path, inside: str, *, read_only: bool = False) -> dict[str, Any]:
    """A directory of this machine in a container. Not as a text `PLACE:INSIDE`, which no colon may be in, and for which
    the engine makes a directory where there is none."""
    return {"Type": "bind", "Source": str(place), "Target": inside, "ReadOnly": read_only}


def _host_processes(limits: Limits, own_kernel: bool) -> int:
    if own_kernel:
        return limits.processes * SENTRY_FACTOR + SENTRY_PROCESSES
    return limits.processes + SPARE_PROCESSES
