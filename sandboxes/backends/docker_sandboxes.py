"""What the docker backend does, one blocking call each: open, launch, look, destroy.

Above: `docker`, which runs these in threads with deadlines. Below: the engine, workspaces, and what a container is.

A container goes on record with the engine when it is created, under a name that is one of a kind, and everything else
of a sandbox hangs on that record: whatever is interrupted is found by its labels.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import platform
import secrets
import shutil
import subprocess
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from docker import errors

from sandboxes.backends import docker_probe, seccomp, unix_channel
from sandboxes.backends.agent_copy import make_agent
from sandboxes.backends.base import Life, Problem, Status
from sandboxes.backends.docker_container import (
    AGENT,
    DATA,
    DEFAULT_PATH,
    LABEL,
    NAME,
    SOCKET,
    Identity,
    Place,
    configuration,
    container_name,
    creation,
    handle_of,
    mount,
    owner_filter,
)
from sandboxes.backends.docker_engine import Engine, translating
from sandboxes.backends.uids import UidRange
from sandboxes.backends.workspaces import Workspaces
from sandboxes.errors import BackendError, EngineUnavailable, EnvironmentMissing, IsolationUnavailable, StateLost
from sandboxes.owner import Owner
from sandboxes.spec import Handle, SandboxSpec, Usage

# Of single HTTP requests, in seconds: a look; a creation or a start; a removal.
CALL_S = 10.0
REQUEST_S = 30.0
REMOVE_S = 60.0
EMPTY_S = 30.0  # for the files of a workspace
KILLED = 128 + 9  # exit code
OOM_EVENT_S = 1.5
CONFLICT = 409  # HTTP: the container's name is taken
READY_S = 20.0  # from a container's start to an agent that accepts connections
# Where the engine maps uids (user namespaces, rootless) only 65,536 of them exist.
MAPPED_UIDS = UidRange(60_000, 4_000)
# Runtimes whose kernel keeps a socket that is bound inside to itself, unless they are told otherwise.
SOCKETLESS = ("runsc", "gvisor", "kata")

log = logging.getLogger(__name__)

ChannelKind = Literal["auto", "socket", "attach"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the backend was made with. `times`: the agent's timeout_s, grace_s and fence_s."""

    owner: Owner
    root: Path
    image: str
    runtime: str | None
    networks: frozenset[str]
    channel: ChannelKind
    agent: Path
    uids: UidRange
    times: tuple[float, float, float | None]

    @property
    def own_kernel(self) -> bool:
        """Whether the runtime puts a kernel of its own between sandboxes and the machine's."""
        return any(word in (self.runtime or "") for word in SOCKETLESS)


class Sandboxes:
    """The sandboxes of one owner on one engine. `launching` is the engine for what may wait long."""

    def __init__(self, settings: Settings, engine: Engine, launching: Engine) -> None:
        self._settings = settings
        self._owner = settings.owner
        self._root = settings.root
        self._engine = engine
        self._launching = launching
        self._workspaces = Workspaces(settings.root)
        self._uids = settings.uids
        # Known after `open`.
        self._attach = settings.channel == "attach"
        self._agent = settings.agent
        self._search_path = DEFAULT_PATH
        self._filter: bytes | None = None

    @property
    def filters(self) -> bool:
        """Whether system calls are filtered beyond the engine's profile."""
        return self._filter is not None

    # --- opening -------------------------------------------------------------------------------------------------

    def open_to_remove(self) -> None:
        """For who launches nothing: no image is needed, and no runtime."""
        self._reach()
        self._workspaces.make()

    def _reach(self) -> None:
        self._engine.reach()
        if reason := docker_probe.old_engine(self._engine.ask(lambda api: api.version(api_version=False))):
            raise IsolationUnavailable(reason)

    def open(self) -> None:
        self._reach()
        info = self._engine.ask(lambda api: api.info())
        fatal = [problem for problem in self._engine_problems(info) if problem.fatal]
        if fatal:
            raise IsolationUnavailable(f"{fatal[0].what}: {fatal[0].mend}")
        self._read_image()
        self._filter = seccomp.program(str(info.get("Architecture")))
        mapped = any(word in str(info.get("SecurityOptions")) for word in ("name=userns", "name=rootless"))
        if mapped:
            self._uids = MAPPED_UIDS
        self._attach = self._settings.channel == "attach" or (
            self._settings.channel == "auto" and not self._sockets_work(mapped)
        )
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._root / "channels").mkdir(mode=0o700, exist_ok=True)
        self._workspaces.make()
        self._agent = stage_agent(self._settings.agent, self._root / "agents")

    def empty_trash(self) -> None:
        """Removes what an earlier host discarded and did not finish removing."""
        for left in self._workspaces.discarded():
            self._empty(left)

    def _sockets_work(self, mapped: bool) -> bool:
        """A container's root must be the directory's owner, and this process must be allowed to connect."""
        hidden = self._settings.own_kernel
        return os.geteuid() == 0 and self._engine.local and not mapped and not hidden

    def _read_image(self) -> None:
        try:
            image = self._engine.ask(lambda api: api.inspect_image(self._settings.image))
        except errors.ImageNotFound:
            raise EnvironmentMissing(
                f"the engine has no image {self._settings.image}: run: {docker_probe.how_to_get(self._settings.image)}"
            ) from None
        for entry in image["Config"].get("Env") or []:
            name, _, value = entry.partition("=")
            if name == "PATH":
                self._search_path = value

    def _engine_problems(self, info: dict[str, Any]) -> list[Problem]:
        networks = [network["Name"] for network in self._engine.ask(lambda api: api.networks())]
        return docker_probe.engine_problems(info, self._settings.runtime, networks, self._settings.networks)

    def problems(self) -> list[Problem]:
        self._engine.reach()
        if reason := docker_probe.old_engine(self._engine.ask(lambda api: api.version(api_version=False))):
            return [Problem(reason, "update the engine", fatal=True)]
        found = self._engine_problems(self._engine.ask(lambda api: api.info()))
        if any(problem.fatal for problem in found):
            return found
        return found + docker_probe.image_problems(self._engine, self._settings.image, self._settings.runtime)

    # --- launching -----------------------------------------------------------------------------------------------

    def launch(self, key: str, spec: SandboxSpec, workspace: str, abandoned: threading.Event) -> tuple[Handle, bool]:
        """The handle, and whether this call started it. Whatever ends it but a return leaves nothing."""
        known = self._find(key)
        if known is not None:
            if known["State"] == "running":
                return handle_of(known["Id"], known["Labels"]), False
            self.destroy(handle_of(known["Id"], known["Labels"]), keep_workspace=True)
        existing = self._workspaces.uid(workspace)
        uid = existing if existing is not None and existing in self._uids else self._uid(workspace)
        identity = Identity(key, secrets.token_hex(16), workspace, round(time.time(), 3), uid)
        try:
            self._make_workspace(workspace, existing, uid)
            handle = self._start(identity, spec, self._make_place(identity), abandoned)
            if abandoned.is_set():
                raise EngineUnavailable("the launch was given up", sandbox=identity.sandbox_id)
        except errors.APIError as error:
            taken = error.status_code == CONFLICT
            self._undo(identity, keep_workspace=existing is not None or taken)
            if taken and (other := self.lookup(key)) is not None:
                return other, False  # another process of this owner was quicker
            raise
        except BaseException:
            self._undo(identity, keep_workspace=existing is not None)
            raise
        return handle, True

    def _start(self, identity: Identity, spec: SandboxSpec, place: Place, abandoned: threading.Event) -> Handle:
        api = self._launching.client(REQUEST_S)
        attach = place.channel is None
        body = creation(
            self._settings.image,
            identity,
            spec,
            place,
            self._owner,
            runtime=self._settings.runtime,
            own_kernel=self._settings.own_kernel,
            network=spec.egress,
        )
        given = configuration(
            self._owner,
            identity,
            spec,
            search_path=self._search_path,
            attached=attach,
            own_kernel=self._settings.own_kernel,
            seccomp=self._filter,
            times=self._settings.times,
        )
        name = container_name(self._owner, identity.key)
        container = str(api.create_container_from_config(body, name)["Id"])
        with self._launching.attach(container, output=attach, timeout_s=REQUEST_S) as stream:
            api.start(container)
            stream.sendall(given)
            if place.channel is not None:
                self._await_agent(container, place.channel, abandoned)
        return Handle(
            NAME, identity.key, identity.sandbox_id, container, identity.workspace, created_at=identity.created_at
        )

    def _await_agent(self, container: str, channel: Path, abandoned: threading.Event) -> None:
        deadline = time.monotonic() + READY_S
        pause, look_at = 0.002, time.monotonic() + 0.5
        while True:
            with contextlib.suppress(OSError):
                unix_channel.connected(channel, SOCKET).close()
                return
            now = time.monotonic()
            if now >= look_at:
                look_at = now + 0.5
                self._require_alive(container)
            if now >= deadline:
                raise EngineUnavailable(f"the sandbox's agent was not ready within {READY_S:g} s")
            if abandoned.wait(pause):
                raise EngineUnavailable("the launch was given up")
            pause = min(pause * 1.5, 0.05)

    def _require_alive(self, container: str) -> None:
        api = self._launching.client(CALL_S)
        state = api.inspect_container(container)["State"]
        if not state["Running"]:
            said = api.logs(container, tail=5).decode("utf-8", "replace").strip()
            raise EnvironmentMissing(
                f"the sandbox's PID 1 ended at once ({_ending(state)}): {said[-500:] or 'it said nothing'}. "
                "The image needs Python >= 3.11 as python3: see toolhost doctor"
            )

    def _make_workspace(self, workspace: str, existing: int | None, uid: int) -> None:
        if os.geteuid() != 0:
            if existing is None:
                self._workspaces.create(workspace, uid)
            # The directory above it is closed to everybody but this host; the container has another uid than it.
            self._workspaces.data(workspace).chmod(0o777)
        elif existing is None:
            self._workspaces.create(workspace, uid)
        elif existing != uid:
            self._workspaces.give(workspace, uid)

    def _make_place(self, identity: Identity) -> Place:
        channel = None
        if not self._attach:
            channel = self.channel_directory(identity.sandbox_id)
            channel.mkdir(mode=0o700)
        return Place(self._agent, self._workspaces.data(identity.workspace), channel)

    def _undo(self, identity: Identity, *, keep_workspace: bool) -> None:
        """Best effort: what the engine will not remove now is found by its labels later."""
        handle = Handle(NAME, identity.key, identity.sandbox_id, "", identity.workspace)
        with contextlib.suppress(BackendError), translating():
            known = self._find(identity.key)
            if known is not None and known["Labels"].get(f"{LABEL}sandbox") == identity.sandbox_id:
                handle = handle_of(known["Id"], known["Labels"])
            self.destroy(handle, keep_workspace)

    def _uid(self, workspace: str) -> int:
        # The same for the same workspace, whoever launches it; two that share one are apart by their namespaces.
        return self._uids.first + zlib.crc32(workspace.encode()) % self._uids.count

    def channel_directory(self, sandbox_id: str) -> Path:
        return self._root / "channels" / sandbox_id

    # --- looking -------------------------------------------------------------------------------------------------

    def _find(self, key: str) -> dict[str, Any] | None:
        filters = {"label": [*owner_filter(self._owner), f"{LABEL}key={key}"]}
        found: list[dict[str, Any]] = self._engine.client(CALL_S).containers(all=True, filters=filters)
        return found[0] if found else None

    def lookup(self, key: str) -> Handle | None:
        found = self._find(key)
        return handle_of(found["Id"], found["Labels"]) if found is not None and found["State"] == "running" else None

    def _state(self, handle: Handle) -> dict[str, Any] | None:
        """What the engine says of this very instance; None when it is gone or is not ours."""
        try:
            found = self._engine.client(CALL_S).inspect_container(handle.instance or handle.key)
        except errors.NotFound:
            return None
        named = found["Config"]["Labels"] or {}
        ours = named.get(f"{LABEL}owner") == self._owner.id and named.get(f"{LABEL}sandbox") == handle.sandbox_id
        return dict(found["State"]) if ours else None

    def require_running(self, handle: Handle) -> None:
        state = self._state(handle)
        if state is None or not state["Running"]:
            ended = "was removed" if state is None else f"has ended ({_ending(state)})"
            raise StateLost(f"its container {ended}", sandbox=handle.sandbox_id)

    def poll(self, handle: Handle) -> Status:
        state = self._state(handle)
        if state is None:
            return Status(Life.GONE)
        if state["Running"]:
            return Status(Life.RUNNING)
        out_of_memory = bool(state.get("OOMKilled")) or self._told_late(handle, state)
        return Status(Life.ENDED, _ending(state), out_of_memory=out_of_memory)

    def _told_late(self, handle: Handle, state: dict[str, Any]) -> bool:
        """Whether a killed container had run out of memory, where its state does not say so: the engine hears of the
        two from different sources, and of what it hears after the end it tells by an event (runsc: up to 1 s later)."""
        if state.get("ExitCode") != KILLED:
            return False
        # By the engine's clock; it answers then, or earlier when there is one.
        until = datetime.datetime.fromisoformat(state["FinishedAt"]).timestamp() + OOM_EVENT_S
        told = {"container": handle.instance or handle.key, "event": "oom"}
        events = self._engine.client(CALL_S).events(since="1", until=f"{until:.6f}", filters=told)
        with contextlib.closing(events):
            return any(True for _ in events)

    def usage(self, handle: Handle) -> Usage:
        self.require_running(handle)
        stats = self._engine.client(CALL_S).stats(handle.instance, stream=False, one_shot=True)
        memory = stats.get("memory_stats") or {}
        # Pages of files that can be dropped at any time do not count: cgroup v2 and v1 name them differently.
        kept = memory.get("stats") or {}
        droppable = kept.get("inactive_file", kept.get("total_inactive_file", 0))
        used = memory.get("usage")
        cpu = (stats.get("cpu_stats") or {}).get("cpu_usage", {}).get("total_usage")
        return Usage(
            memory_bytes=None if used is None else max(0, used - droppable),
            cpu_s=None if cpu is None else cpu / 1e9,
            processes=(stats.get("pids_stats") or {}).get("current"),
        )

    def list_owned(self) -> list[Handle]:
        filters = {"label": owner_filter(self._owner)}
        found = []
        for container in self._engine.client(CALL_S).containers(all=True, filters=filters):
            # A container in whose labels somebody else put our owner, but nothing that makes sense, is not ours.
            with contextlib.suppress(KeyError, ValueError):
                found.append(handle_of(container["Id"], container["Labels"]))
        return found

    def workspaces(self) -> list[str]:
        return self._workspaces.names()

    # --- destroying ----------------------------------------------------------------------------------------------

    def destroy(self, handle: Handle, keep_workspace: bool) -> None:
        if handle.instance and self._state(handle) is not None:
            with contextlib.suppress(errors.NotFound):
                self._engine.client(REMOVE_S).remove_container(handle.instance, force=True, v=True)
        # Only now is nobody left in it who could change what is removed.
        shutil.rmtree(self.channel_directory(handle.sandbox_id), ignore_errors=True)
        if not keep_workspace:
            self.remove_workspace(handle.workspace)

    def remove_workspace(self, workspace: str) -> None:
        aside = self._workspaces.discard(workspace)
        if aside is not None:
            self._empty(aside)

    def _empty(self, discarded: Path) -> None:
        """Removes what user code made, as the uid that made it: nothing in there is opened with other rights.

        It is out of sight already. What resists, or takes too long, is left for the next start.
        """
        data = discarded / "data"
        try:
            if data.exists() and (os.geteuid() != 0 or not self._empty_as_its_owner(data)):
                self._empty_by_container(data)
            self._workspaces.removed(discarded)
        except (OSError, subprocess.TimeoutExpired, errors.DockerException) as error:
            log.warning("a discarded workspace could not be removed yet: %s", error)

    @staticmethod
    def _empty_as_its_owner(data: Path) -> bool:
        """Whether that was all: directories without a mode resist their owner, not a container's root."""
        uid = data.lstat().st_uid
        done = subprocess.run(
            ["find", ".", "-mindepth", "1", "-delete"],
            cwd=data,
            user=uid,
            group=uid,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=EMPTY_S,
            check=False,
        )
        return done.returncode == 0

    def _empty_by_container(self, data: Path) -> None:
        body = {
            "Image": self._settings.image,
            "Entrypoint": ["find", DATA, "-mindepth", "1", "-delete"],
            "Cmd": [],
            "User": "0:0",
            "Labels": {f"{LABEL}owner": self._owner.id, f"{LABEL}purpose": "remove"},
            "HostConfig": {
                "NetworkMode": "none",
                "ReadonlyRootfs": True,
                "Mounts": [mount(data, DATA)],
                "CapDrop": ["ALL"],
                "CapAdd": ["DAC_OVERRIDE", "FOWNER"],  # what has no mode, and what has the sticky bit
                "SecurityOpt": ["no-new-privileges:true"],
            },
        }
        api = self._engine.client(REMOVE_S)
        container = api.create_container_from_config(body)["Id"]
        try:
            api.start(container)
            api.wait(container, timeout=EMPTY_S)
        finally:
            api.remove_container(container, force=True, v=True)


def stage_agent(source: Path, places: Path) -> Path:
    """A copy of the agent's programs that every uid can read, and that an update of this package does not change under
    a sandbox that runs. Its bytecode is that of the host's version of Python: an image with another one, which compiles
    at every start, starts slower. Raises OSError."""
    places.mkdir(mode=0o700, exist_ok=True)
    return make_agent(places, source, AGENT, platform.python_version())


def _ending(state: dict[str, Any]) -> str:
    """For people: how PID 1 ended."""
    said = [f"exit code {state.get('ExitCode')}"]
    if state.get("OOMKilled"):
        said.append("out of memory")
    if state.get("Error"):
        said.append(str(state["Error"]))
    return ", ".join(said)
