"""What runs on one node of the cluster: its own backend, the relay in front of it, and its sweeps.

Above: `ray_host`, the Ray actor that this is in. Below: `ray_relay`, `ray_feed`, `ray_held`, `ray_local`. Nothing of
Ray is here.

A sandbox belongs to a lease, which is where its files are. What has no lease at this node any more is ended: the
session has moved. A lease in which nothing ever came to be is given back. Who releases a lease is its node, so that
nobody launches in one that is just being released.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from sandboxes.backends import ray_local, ray_wire
from sandboxes.backends.base import Backend, Channel, Life
from sandboxes.backends.ray_feed import Feed
from sandboxes.backends.ray_held import Held
from sandboxes.backends.ray_names import NAME, STARTING, NodeSettings, Place, loaded, stored
from sandboxes.backends.ray_relay import Operation, Relay
from sandboxes.backends.ray_versions import versions
from sandboxes.errors import BackendError, EngineUnavailable, NoCapacity, SandboxError
from sandboxes.owner import Owner
from sandboxes.spec import Handle, Limits, SandboxSpec

log = logging.getLogger(__name__)

OPEN_RETRY_S = 5.0
LAUNCHES = 8  # at once; a local backend's deadline is for one launch, not for those before it
STRAY_ROUNDS = 2  # a sandbox is seen without a lease so often before it is ended
RELEASED_KEPT = 4096


class Node:
    """`release` gives a lease back to Ray; it blocks, and is called in a thread. `capacity`: sessions, for people."""

    def __init__(
        self,
        settings: NodeSettings,
        owner: Owner,
        *,
        node: str,
        host: str,
        capacity: int,
        release: Callable[[str], None],
        local: Backend | None = None,
    ) -> None:
        self._settings = settings
        self._owner = owner
        self._node = node
        self._host = host
        self._capacity = capacity
        self._release = release
        self._root = ray_local.root(settings.local, owner, host)
        self._local = local or ray_local.create(settings.local, owner, self._root)
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._feed = Feed(self._local, self._ended)
        self._leases: dict[str, str] = {}  # by workspace, as launches named them
        self._held = Held(settings.sweep_s)
        self._released: dict[str, None] = {}  # ids of leases that this node has given back
        self._strays: dict[str, int] = {}
        self._unused: dict[str, float] = {}  # leases in which nothing is, since when
        self._last_used: dict[str, float] = {}  # by sandbox id: when a tool host was last connected
        self._last_leases = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._launching = asyncio.Semaphore(LAUNCHES)
        self._draining = False
        self._opened = False
        self.problem = STARTING
        self.place: Place | None = None
        operations: dict[str, Operation] = {
            "launch": self._launch,
            "lookup": self._lookup,
            "poll": self._poll,
            "usage": self._usage,
            "destroy": self._destroy,
            "remove_workspace": self._remove_workspace,
            "give_back": self._give_back,
            "list": self._list,
            "workspaces": self._workspaces,
            "status": self._status,
            "over": self._over,
            "probe": self._probe,
            "drain": self._drain,
        }
        self._relay = Relay(owner, node, self._connect, self._surely, operations)

    # --- opening -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """The relay, and the node's backend when it can be opened; else `problem` says why, and it is tried again."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._draining = (self._root / "draining").exists()
        bind = self._settings.bind or self._host
        port = await self._listen(bind)
        self.place = Place(self._host, port, self._node)
        await self._try_open()
        if not self._opened:
            self._spawn(self._open_later(), "open")

    async def close(self) -> None:
        """Sandboxes live on, until their fence."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._relay.close()
        await self._feed.close()
        await self._local.close()

    async def _listen(self, bind: str) -> int:
        """On the port of the last time if that is free: who knows a sandbox's handle then finds it again."""
        kept = self._root / "relay-port"
        wanted = self._settings.port
        if not wanted:
            with contextlib.suppress(OSError, ValueError):
                wanted = int(kept.read_text())
        try:
            port = await self._relay.start(bind, wanted)
        except OSError:
            if self._settings.port or not wanted:
                raise
            port = await self._relay.start(bind, 0)
        kept.write_text(str(port))
        return port

    async def _try_open(self) -> None:
        try:
            await self._local.open()
            await self._forget_earlier_life()
            for handle in await self._local.list_owned():
                if (await self._local.poll(handle)).life is Life.RUNNING:
                    self._adopt(handle)
        except SandboxError as error:
            self.problem = error.message
            log.warning("this node takes no sessions: %s", error.message)
        else:
            self._opened, self.problem = True, ""

    async def _forget_earlier_life(self) -> None:
        """Ends what an earlier life of this node left: the head has given that up, and its sessions are told that they
        lost their variables and files. None of it may come back under a new lease that happens to be placed here."""
        mark = self._root / "life"
        with contextlib.suppress(OSError):
            if mark.read_text() == self._node:
                return
        for handle in await self._local.list_owned():
            await self._local.destroy(handle)
        for workspace in await self._local.list_workspaces():
            await self._local.remove_workspace(workspace)
        mark.write_text(self._node)

    async def _open_later(self) -> None:
        while not self._opened:
            await asyncio.sleep(OPEN_RETRY_S)
            await self._try_open()

    def _adopt(self, handle: Handle) -> None:
        self._feed.hold(handle)
        self._last_used[handle.sandbox_id] = time.monotonic()

    def _usable(self) -> None:
        if not self._opened:
            kind = ray_wire.NotReady if self.problem == STARTING else EngineUnavailable
            raise kind(f"the node {self._host} takes no sessions: {self.problem}")

    # --- operations --------------------------------------------------------------------------------------------------

    async def _launch(self, arguments: Mapping[str, Any]) -> Any:
        self._usable()
        key, workspace, lease = (str(arguments[name]) for name in ("key", "workspace", "lease"))
        spec = read_spec(arguments["spec"])
        async with self._lock(workspace):
            if lease in self._released:
                raise ray_wire.LeaseGone("the lease was given back")
            running = await self._local.lookup(key)
            if running is None and self._draining and workspace not in await self._local.list_workspaces():
                raise ray_wire.Draining(f"the node {self._host} takes no new sessions")
            try:
                async with self._launching:
                    handle = await self._local.launch(key, spec, workspace)
            except NoCapacity as error:
                raise NoCapacity(f"at capacity: the node {self._host} has no room ({error.message})") from error
            self._leases[workspace] = lease
            self._held.launched(workspace)
            self._adopt(handle)
            return {"handle": stored(self._outer(handle)), "fresh": running is None}

    async def _lookup(self, arguments: Mapping[str, Any]) -> Any:
        self._usable()
        handle = await self._local.lookup(str(arguments["key"]))
        return None if handle is None else stored(self._outer(handle))

    async def _connect(self, handle: Handle) -> Channel:
        self._usable()
        channel = await self._local.connect(self._inner(handle))
        self._last_used[handle.sandbox_id] = time.monotonic()
        return channel

    def _surely(self, handle: Handle) -> bool:
        return self._held.surely(handle.workspace)

    async def _poll(self, arguments: Mapping[str, Any]) -> Any:
        self._usable()
        handle = loaded(arguments["handle"])
        status = await self._local.poll(self._inner(handle))
        return {
            "life": status.life.value,
            "detail": status.detail,
            "out_of_memory": status.out_of_memory,
            "sure": self._surely(handle),
        }

    async def _usage(self, arguments: Mapping[str, Any]) -> Any:
        self._usable()
        return dataclasses.asdict(await self._local.usage(self._inner(loaded(arguments["handle"]))))

    async def _destroy(self, arguments: Mapping[str, Any]) -> Any:
        self._usable()
        handle, keep = self._inner(loaded(arguments["handle"])), bool(arguments.get("keep_workspace"))
        async with self._lock(handle.workspace):
            self._feed.release(handle)
            await self._local.destroy(handle, keep_workspace=keep)
            self._last_used.pop(handle.sandbox_id, None)
            if not keep:
                await self._released_if_empty(handle.workspace, str(arguments.get("lease", "")))
        return True

    async def _remove_workspace(self, arguments: Mapping[str, Any]) -> Any:
        self._usable()
        workspace = str(arguments["workspace"])
        async with self._lock(workspace):
            await self._local.remove_workspace(workspace)
            await self._released_if_empty(workspace, str(arguments.get("lease", "")))
        return True

    async def _give_back(self, arguments: Mapping[str, Any]) -> Any:
        """A lease that its replica does not need, unless somebody else has come to use it."""
        workspace = str(arguments["workspace"])
        async with self._lock(workspace):
            await self._released_if_empty(workspace, str(arguments["lease"]))
        return True

    async def _list(self, arguments: Mapping[str, Any]) -> Any:
        self._usable()
        return [stored(self._outer(handle)) for handle in await self._local.list_owned()]

    async def _workspaces(self, arguments: Mapping[str, Any]) -> Any:
        self._usable()
        return list(await self._local.list_workspaces())

    async def _status(self, arguments: Mapping[str, Any]) -> Any:
        return {
            "draining": self._draining,
            "capacity": self._capacity,
            "sandboxes": len(self._feed.handles),
            "problem": self.problem,
            "versions": versions(),
            "differences": sorted(self._local.differences) if self._opened else [],
        }

    async def _probe(self, arguments: Mapping[str, Any]) -> Any:
        return [dataclasses.asdict(problem) for problem in await self._local.probe()]

    async def _over(self, arguments: Mapping[str, Any]) -> Any:
        """A tool host says that the head has declared this node dead, which Ray may hear here only much later. What the
        head has just said to the node itself counts more."""
        if self._opened:
            gate = asyncio.Semaphore(LAUNCHES)

            async def end(handle: Handle) -> None:
                async with gate:
                    log.warning("the head has given this node up: %s is ended", handle.sandbox_id)
                    await self._end(handle, moved=True)

            owned = await self._local.list_owned()
            await asyncio.gather(*(end(handle) for handle in owned if not self._surely(handle)))
        return True

    async def _drain(self, arguments: Mapping[str, Any]) -> Any:
        """It outlives this process: who drained a node for repair must not find new sessions on it."""
        self._draining = bool(arguments.get("draining", True))
        mark = self._root / "draining"
        if self._draining:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)
        return True

    # --- leases ------------------------------------------------------------------------------------------------------

    async def _released_if_empty(self, workspace: str, lease: str) -> None:
        """The workspace's lease is given back when nothing is in it any more. Its lock is held.

        In the background: the session is over, and whether the head answers now changes nothing. Should this process
        end before it is done, the lease is one in which nothing is, and goes with a later sweep.
        """
        lease = self._leases.get(workspace, lease)
        if not lease or (self._opened and await self._in_use(workspace)):
            return
        self._leases.pop(workspace, None)
        self._released[lease] = None
        while len(self._released) > RELEASED_KEPT:
            del self._released[next(iter(self._released))]
        self._spawn(asyncio.to_thread(self._release, lease), "release")

    async def _in_use(self, workspace: str) -> bool:
        if workspace in await self._local.list_workspaces():
            return True
        return any(handle.workspace == workspace for handle in self._feed.handles)

    async def leases(self, held: Mapping[str, str], asked: float) -> None:
        """One round of sweeping. `held`: the ids of the leases that the head has at this node, by workspace. `asked`:
        when it was asked, by the monotonic clock."""
        self._last_leases = now = time.monotonic()
        self._held.told(held, asked)
        if not self._opened:
            return
        owned = await self._local.list_owned()
        files = set(await self._local.list_workspaces())
        strays = {h.sandbox_id: h for h in owned if h.workspace not in held and not self._lock_taken(h.workspace)}
        files -= {handle.workspace for handle in owned}
        for name in files - held.keys():
            if not self._lock_taken(name):
                strays[f"workspace {name}"] = Handle("", "", "", "", name)
        self._strays = {ident: self._strays.get(ident, 0) + 1 for ident in strays}
        for ident, count in list(self._strays.items()):
            if count >= STRAY_ROUNDS:
                log.warning("the lease of %s is not at this node any more: it is ended", ident)
                await self._end(strays[ident], moved=True)
        taken = files | {handle.workspace for handle in owned}
        empty = {name: lease for name, lease in held.items() if name not in taken and not self._lock_taken(name)}
        self._unused = {lease: self._unused.get(lease, now) for lease in empty.values()}
        for name, lease in empty.items():
            if now - self._unused[lease] >= self._settings.unused_s or lease in self._released:
                log.info("a lease was never used, or left: %s", name)
                async with self._lock(name):
                    await self._released_if_empty(name, lease)
        await self._end_abandoned(owned, now)

    async def without_head(self) -> None:
        """Called now and then when the head does not answer: after long enough, others have taken the sessions over."""
        if self._opened and time.monotonic() - self._last_leases >= self._settings.patience_s:
            for handle in await self._local.list_owned():
                log.warning("no head for %g s: %s is ended", self._settings.patience_s, handle.sandbox_id)
                await self._end(handle, moved=True)

    async def _end_abandoned(self, owned: list[Handle] | Any, now: float) -> None:
        for handle in owned:
            ident = handle.sandbox_id
            if self._relay.attached.get(ident):
                self._last_used[ident] = now
            elif now - self._last_used.setdefault(ident, now) >= self._settings.abandoned_s:
                log.warning("no tool host came for %g s: %s is ended", self._settings.abandoned_s, ident)
                await self._end(handle)

    async def _end(self, handle: Handle, *, moved: bool = False) -> None:
        """`moved`: its lease is at another node, or may be, and so not this one's to give back."""
        async with self._lock(handle.workspace):
            try:
                if handle.sandbox_id:
                    self._feed.release(handle)
                    await self._local.destroy(handle)
                else:
                    await self._local.remove_workspace(handle.workspace)
            except BackendError as error:  # a later sweep tries again
                log.warning("%s cannot be ended: %s", handle.sandbox_id or handle.workspace, error.message)
                return
            self._last_used.pop(handle.sandbox_id, None)
            if moved:
                self._leases.pop(handle.workspace, None)
            await self._released_if_empty(handle.workspace, "")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _ended(self, handle: Handle) -> None:
        """A sandbox has ended by itself. Its files and its lease stay: the session goes on with them."""
        self._last_used.pop(handle.sandbox_id, None)

    def _lock(self, workspace: str) -> asyncio.Lock:
        return self._locks.setdefault(workspace, asyncio.Lock())

    def _lock_taken(self, workspace: str) -> bool:
        lock = self._locks.get(workspace)
        return lock is not None and lock.locked()

    def _outer(self, handle: Handle) -> Handle:
        """As the cluster names it. Nodes that share a kernel could give two sandboxes the same instance."""
        instance = f"{handle.instance}.{self._node}"
        return dataclasses.replace(handle, backend=NAME, node=str(self.place), instance=instance)

    def _inner(self, handle: Handle) -> Handle:
        instance = handle.instance.removesuffix(f".{self._node}")
        return dataclasses.replace(handle, backend=self._local.name, node="", instance=instance)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s: %s", task.get_name(), error)


def spec_fields(spec: SandboxSpec) -> dict[str, Any]:
    """A spec as the wire has it."""
    return {
        "limits": dataclasses.asdict(spec.limits),
        "egress": spec.egress,
        "preimports": list(spec.preimports),
        "environment": dict(spec.environment),
    }


def read_spec(fields: Mapping[str, Any]) -> SandboxSpec:
    """The inverse of `spec_fields`."""
    return SandboxSpec(
        limits=Limits(**fields["limits"]),
        egress=str(fields["egress"]),
        preimports=tuple(fields["preimports"]),
        environment=dict(fields["environment"]),
    )
