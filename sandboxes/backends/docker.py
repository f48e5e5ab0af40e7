"""Sandboxes as containers of a Docker engine, hardened; the runtime (runc, runsc, kata) is a setting.

Above: the manager, through the contract in `base`. Below: `docker_sandboxes`, whose blocking calls run in bounded
threads, each with a deadline, and the two ways to the agent (`unix_channel`, `docker_channel`).

Everything of the host that a container sees lies below `state_dir`, so a host that itself runs in a container works
with the engine beside it when that directory has the same path in both.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import weakref
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import sandboxes.agent
from sandboxes.backends import unix_channel
from sandboxes.backends.base import Backend, Channel, Problem, Status
from sandboxes.backends.docker_channel import attached
from sandboxes.backends.docker_container import NAME, SOCKET, container_name
from sandboxes.backends.docker_engine import Engine
from sandboxes.backends.docker_sandboxes import CALL_S, ChannelKind, Sandboxes, Settings
from sandboxes.backends.uids import UidRange
from sandboxes.errors import BackendError, EngineUnavailable, IsolationUnavailable
from sandboxes.owner import Owner
from sandboxes.spec import Handle, SandboxSpec, Usage

# Deadlines of whole operations, in seconds.
OPEN_S = 30.0
PROBE_S = 60.0
LOOK_S = 15.0
LAUNCH_S = 60.0
DESTROY_S = 90.0
LAUNCH_THREADS = 24
CALL_THREADS = 16


class DockerBackend(Backend):
    """Sandboxes as containers.

    `state_dir`: workspaces, channels and the agent's programs are kept below `docker/` in it; mode 0700. `image`: has
    Python >= 3.11 as `python3`. `engine_url`: the engine's address. `runtime`: its name there; None is the engine's
    default. `networks`: the engine's networks that a spec's egress may name. `channel`: how frames travel; "auto" is
    the socket where it works. `timeout_s`, `grace_s`, `fence_s`: for the agent's configuration (see `agent.wire`),
    seconds.
    """

    name = NAME

    def __init__(
        self,
        *,
        state_dir: Path,
        owner: Owner,
        image: str = "toolhost-python:latest",
        engine_url: str = "unix:///var/run/docker.sock",
        runtime: str | None = None,
        networks: frozenset[str] = frozenset(),
        channel: ChannelKind = "auto",
        agent: Path | None = None,
        uids: UidRange | None = None,
        timeout_s: float = 120.0,
        grace_s: float = 2.0,
        fence_s: float | None = None,
    ) -> None:
        self._settings = Settings(
            owner=owner,
            root=state_dir / NAME,
            image=image,
            runtime=runtime,
            networks=networks,
            channel=channel,
            agent=agent if agent is not None else Path(sandboxes.agent.__path__[0]),
            uids=uids or UidRange(),
            times=(timeout_s, grace_s, fence_s),
        )
        # Launches wait long; looking and destroying must not wait behind them.
        self._launching = Engine(engine_url, threads=LAUNCH_THREADS)
        self._engine = Engine(engine_url, threads=CALL_THREADS)
        self._sandboxes = Sandboxes(self._settings, self._engine, self._launching)
        self._keys: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._undoing: set[asyncio.Task[None]] = set()

    async def open(self, *, launching: bool = True) -> None:
        await self._engine.call(OPEN_S, self._sandboxes.open if launching else self._sandboxes.open_to_remove)
        self._engine.start(self._sandboxes.empty_trash)

    async def close(self) -> None:
        if self._undoing:
            await asyncio.wait(self._undoing, timeout=LOOK_S)
        self._launching.close()
        self._engine.close()

    async def probe(self) -> Sequence[Problem]:
        try:
            return await self._engine.call(PROBE_S, self._sandboxes.problems)
        except BackendError as error:
            mend = f"start the Docker engine, and see that this user may use {self._engine.url}"
            return [Problem(error.message, mend, fatal=True)]

    @property
    def differences(self) -> frozenset[str]:
        # A kernel of the sandbox's own is one process among those that its memory limit is about: out of memory ends
        # the sandbox, not the one process inside that asked for too much.
        kernel = "memory-limit-ends-sandbox" if self._settings.own_kernel else "kernel-shared"
        filtered = () if self._sandboxes.filters else ("syscall-filter-none",)
        return frozenset({"disk-quota-watched", kernel, *filtered})

    async def launch(self, key: str, spec: SandboxSpec, workspace: str) -> Handle:
        if spec.egress != "none" and spec.egress not in self._settings.networks:
            raise IsolationUnavailable(f"egress {spec.egress!r} is none of the networks that the settings allow")
        async with self._keys.setdefault(key, asyncio.Lock()):
            abandoned = threading.Event()
            work = self._launching.start(self._sandboxes.launch, key, spec, workspace, abandoned)
            try:
                async with asyncio.timeout(LAUNCH_S):  # before Python 3.12 `wait_for` can swallow a cancellation
                    handle, _ = await asyncio.shield(work)
            except TimeoutError:
                abandoned.set()
                self._undo_later(work)
                raise EngineUnavailable(f"the Docker engine started no sandbox within {LAUNCH_S:g} s") from None
            except asyncio.CancelledError:
                abandoned.set()
                await _finished(self._undone(work))
                raise
            return handle

    async def lookup(self, key: str) -> Handle | None:
        return await self._engine.call(LOOK_S, self._sandboxes.lookup, key)

    async def connect(self, handle: Handle) -> Channel:
        nonce = self._settings.owner.nonce(handle.sandbox_id)
        directory = self._sandboxes.channel_directory(handle.sandbox_id)
        try:
            await self._engine.call(LOOK_S, self._sandboxes.require_running, handle)
        except EngineUnavailable:
            if not directory.is_dir():
                raise
            # A sandbox that runs needs no engine: whether anybody listens at its own socket says whether it does.
        if directory.is_dir():
            return await unix_channel.connect(directory, SOCKET, nonce, timeout_s=CALL_S)
        attaching = self._engine.start(self._engine.attach, handle.instance, output=True, timeout_s=CALL_S)
        try:
            stream = await asyncio.shield(attaching)
        except asyncio.CancelledError:
            attaching.add_done_callback(_close)
            raise
        return await attached(stream, nonce)

    async def poll(self, handle: Handle) -> Status:
        return await self._engine.call(LOOK_S, self._sandboxes.poll, handle)

    async def usage(self, handle: Handle) -> Usage:
        return await self._engine.call(LOOK_S, self._sandboxes.usage, handle)

    async def destroy(self, handle: Handle, *, keep_workspace: bool = False) -> None:
        await self._engine.call(DESTROY_S, self._sandboxes.destroy, handle, keep_workspace)

    async def remove_workspace(self, workspace: str) -> None:
        await self._engine.call(DESTROY_S, self._sandboxes.remove_workspace, workspace)

    async def list_owned(self) -> Sequence[Handle]:
        return await self._engine.call(LOOK_S, self._sandboxes.list_owned)

    async def list_workspaces(self) -> Sequence[str]:
        return await self._engine.call(LOOK_S, self._sandboxes.workspaces)

    def title(self, handle: Handle) -> str:
        return container_name(self._settings.owner, handle.key)

    def _undo_later(self, work: asyncio.Future[tuple[Handle, bool]]) -> None:
        task = asyncio.create_task(self._undone(work), name="docker undo")
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _undone(self, work: asyncio.Future[tuple[Handle, bool]]) -> None:
        """Waits for a launch that nobody wants any more, and destroys what it started."""
        with contextlib.suppress(BackendError):
            handle, fresh = await work
            if fresh:
                await self.destroy(handle)


def _close(attaching: asyncio.Future[socket.socket]) -> None:
    if not attaching.cancelled() and attaching.exception() is None:
        attaching.result().close()


async def _finished(work: Coroutine[Any, Any, None]) -> None:
    """Waits for it even when cancelled again: what it cleans up would be left."""
    task = asyncio.create_task(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()
