"""Sandboxes on the nodes of a Ray cluster; each node runs its own with bubblewrap or docker.

Above: the manager, through the contract in `base`; any number of tool hosts (replicas) share the cluster.
Below: `ray_leases` (which node a session is on), `ray_nodes` (the nodes and what is known of them), `ray_peer` (what a
node is asked, and the bytes), `ray_doubts` (whether a session has moved). What runs is reached without Ray: only new
sessions wait when its head is away.

A session's lease says where its files are. When its node dies, Ray moves the lease by itself, and nothing else: what
was in the sandbox is gone, and whoever has its handle is told so (NodeGone).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sandboxes.backends import ray_names, ray_peer
from sandboxes.backends.base import Backend, Channel, Life, Problem, Status
from sandboxes.backends.ray_doubts import Doubts
from sandboxes.backends.ray_leases import Lease, Leases
from sandboxes.backends.ray_names import NAME, NodeInfo, NodeSettings, Place, lease_name, loaded, stored
from sandboxes.backends.ray_node import spec_fields
from sandboxes.backends.ray_nodes import Entry, Nodes
from sandboxes.backends.ray_peer import Unreachable
from sandboxes.backends.ray_wire import Draining, LeaseGone, NotAdmitted, NotReady
from sandboxes.errors import BackendError, EngineUnavailable, NodeGone, SandboxError, StateLost
from sandboxes.owner import Owner
from sandboxes.spec import Handle, SandboxSpec, Usage

log = logging.getLogger(__name__)

T = TypeVar("T")

LAUNCH_S = 55.0
NODE_LAUNCH_S = 45.0
DESTROY_S = 80.0
LOOK_S = 8.0  # a node that does not answer is waited for so long: its NodeHost may just be coming back
PAUSE_S = 0.05
REMEMBERED = 20_000
MOVING_PAUSE_S = 0.1
GONE = "the node that it ran on is gone"


class RayBackend(Backend):
    """`address`: of the head, HOST:PORT, or "auto". `node`: what every node is told. `environment`: variables for the
    process that speaks with Ray (its token)."""

    name = NAME
    shared = True

    def __init__(
        self,
        *,
        owner: Owner,
        node: NodeSettings,
        address: str = "auto",
        environment: Mapping[str, str] | None = None,
        leases: Leases | None = None,
    ) -> None:
        """`leases`: another way to the head than a process of its own."""
        self._owner = owner
        self._leases = leases or Leases(
            address=address,
            namespace=ray_names.namespace(owner),
            owner_id=owner.id,
            settings=node,
            environment=environment or {},
        )
        self._nodes = Nodes(owner, self._leases, node.patience_s)
        self._doubts = Doubts(owner, self._leases)
        self._opened = False
        self._undoing: set[asyncio.Task[None]] = set()
        self._places: dict[str, Place] = {}  # by key: where this host has seen its sandbox

    # --- the contract ------------------------------------------------------------------------------------------------

    async def open(self, *, launching: bool = True) -> None:
        await self._leases.open()
        try:
            await self._nodes.open(launching=launching)
        except BaseException:
            await self.close()
            raise
        self._opened = True

    async def close(self) -> None:
        self._opened = False
        if self._undoing:
            await asyncio.wait(self._undoing, timeout=LOOK_S)
        await self._doubts.close()
        await self._nodes.close()
        await self._leases.close()

    async def probe(self) -> Sequence[Problem]:
        try:
            if self._opened:
                return await self._nodes.problems()
            await self.open(launching=False)
            try:
                return await self._nodes.problems()
            finally:
                await self.close()
        except NotAdmitted as error:
            return [Problem(error.message, "or see docs/cluster.md: the same on every machine", fatal=True)]
        except BackendError as error:
            mend = "see that Ray runs on this machine (`ray status`), and the settings in [ray]; docs/cluster.md"
            return [Problem(error.message, mend, fatal=True)]

    @property
    def differences(self) -> frozenset[str]:
        return self._nodes.differences

    async def launch(self, key: str, spec: SandboxSpec, workspace: str) -> Handle:
        work = asyncio.create_task(self._launch(key, spec, workspace), name="ray launch")
        try:
            async with asyncio.timeout(LAUNCH_S):  # `wait_for` can swallow a cancellation before Python 3.12
                handle, _ = await asyncio.shield(work)
        except TimeoutError:
            self._undo_later(work)
            raise EngineUnavailable(f"the cluster started no sandbox within {LAUNCH_S:g} s") from None
        except asyncio.CancelledError:
            await _finished(self._undone(work))
            raise
        self._remember(handle)
        return handle

    async def lookup(self, key: str) -> Handle | None:
        lease = await self._leases.find(lease_name(self._owner.id, key))
        if lease is None:  # its files are under another name, or there is nothing
            answers = await self._nodes.ask_all("lookup", LOOK_S, key=key)
            return next((loaded(found) for found in answers if found is not None), None)
        if not lease.node:
            raise NodeGone(GONE)
        found = await self._ask_at(lease, "lookup", key=key)
        if found is not None:
            return loaded(found)
        seen = self._places.get(key)
        if seen is not None and not lease.node.startswith(seen.node):
            raise NodeGone(GONE)
        return None

    async def connect(self, handle: Handle) -> Channel:
        channel = await self._persist(handle, lambda: self._attached(handle))
        self._remember(handle)
        return channel

    async def poll(self, handle: Handle) -> Status:
        began = time.monotonic()
        found = await self._at(handle, "poll", LOOK_S)
        if not ray_peer.sure(found, began) and await self._moved(handle, over=False):
            raise NodeGone(GONE, sandbox=handle.sandbox_id)
        return Status(Life(found["life"]), str(found["detail"]), bool(found["out_of_memory"]))

    async def usage(self, handle: Handle) -> Usage:
        return Usage(**await self._at(handle, "usage", LOOK_S))

    async def destroy(self, handle: Handle, *, keep_workspace: bool = False) -> None:
        try:
            await self._at(handle, "destroy", DESTROY_S, keep_workspace=keep_workspace)
        except NodeGone:
            if not keep_workspace:
                await self._give_up(handle.workspace)
        if not keep_workspace:
            self._places.pop(handle.key, None)

    async def remove_workspace(self, workspace: str) -> None:
        lease = await self._leases.find(lease_name(self._owner.id, workspace))
        if lease is None:
            await self._nodes.ask_all("remove_workspace", DESTROY_S, workspace=workspace)
        elif not lease.node:
            await self._leases.remove(lease.id)
        else:
            try:
                await self._ask_at(lease, "remove_workspace", workspace=workspace, lease=lease.id)
            except NodeGone:
                await self._give_up(workspace)

    async def list_owned(self) -> Sequence[Handle]:
        return [loaded(fields) for found in await self._nodes.ask_all("list", LOOK_S) for fields in found]

    async def list_workspaces(self) -> Sequence[str]:
        return sorted({str(name) for found in await self._nodes.ask_all("workspaces", LOOK_S) for name in found})

    # --- for operators -----------------------------------------------------------------------------------------------

    def nodes(self) -> Sequence[NodeInfo]:
        """The nodes as they were a moment ago."""
        return self._nodes.infos()

    @property
    def head_answers(self) -> bool:
        """Whether the last question to the head was answered."""
        return self._nodes.fresh

    async def drain(self, node: str, *, draining: bool = True) -> None:
        """From now on the node takes no new sessions; those that it has stay. Or it takes them again.

        `node`: its address, or how its id begins. Raises BackendError, EngineUnavailable.
        """
        await self._nodes.refresh()
        entry = self._nodes.named(node)
        await self._nodes.ask(entry, "drain", LOOK_S, draining=draining)
        await self._nodes.refresh()

    # --- launching ---------------------------------------------------------------------------------------------------

    async def _launch(self, key: str, spec: SandboxSpec, workspace: str) -> tuple[Handle, bool]:
        name = lease_name(self._owner.id, workspace)
        avoid = self._nodes.closed()
        while True:
            try:
                lease = await self._leases.lease(name, sorted(avoid))
            except LeaseGone:
                await asyncio.sleep(PAUSE_S)
                continue
            entry = await self._nodes.entry(lease.node)
            if entry is None or entry.place is None:
                if entry is not None and entry.problem and lease.fresh:
                    avoid.add(lease.node)
                    await self._leases.remove(lease.id)
                await asyncio.sleep(MOVING_PAUSE_S)  # a node that has died, or one whose NodeHost is just starting
                continue
            try:
                arguments = {"key": key, "spec": spec_fields(spec), "workspace": workspace, "lease": lease.id}
                found = await self._nodes.ask(entry, "launch", NODE_LAUNCH_S, **arguments)
            except LeaseGone:
                await asyncio.sleep(PAUSE_S)
            except Draining:
                avoid.add(lease.node)
                await self._leases.remove(lease.id)
            except (Unreachable, NodeGone, NotReady):
                await asyncio.sleep(MOVING_PAUSE_S)
                await self._nodes.refresh_soon()
            except BackendError:
                if lease.fresh:
                    await self._give_back(entry, workspace, lease)
                raise
            else:
                return loaded(found["handle"]), bool(found["fresh"])

    def _remember(self, handle: Handle) -> None:
        self._places[handle.key] = _place(handle)
        while len(self._places) > REMEMBERED:
            del self._places[next(iter(self._places))]

    def _undo_later(self, work: asyncio.Task[tuple[Handle, bool]]) -> None:
        task = asyncio.create_task(self._undone(work), name="ray undo")
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _undone(self, work: asyncio.Task[tuple[Handle, bool]]) -> None:
        """Waits for a launch that nobody wants any more, and destroys what it started."""
        with contextlib.suppress(BackendError, TimeoutError):
            async with asyncio.timeout(LAUNCH_S):
                handle, fresh = await work
            if fresh:
                await self.destroy(handle)

    async def _give_back(self, entry: Entry, workspace: str, lease: Lease) -> None:
        with contextlib.suppress(SandboxError):
            await self._nodes.ask(entry, "give_back", LOOK_S, workspace=workspace, lease=lease.id)

    async def _give_up(self, workspace: str) -> None:
        """The session is over, and its node was gone before: its lease may be on its way, or somewhere else."""
        lease = await self._leases.find(lease_name(self._owner.id, workspace))
        if lease is None:
            return
        entry = await self._nodes.entry(lease.node) if lease.node else None
        if entry is not None and entry.place is not None and not await self._nodes.gone(entry.place):
            await self._give_back(entry, workspace, lease)
        else:
            await self._leases.remove(lease.id)

    # --- asking nodes ------------------------------------------------------------------------------------------------

    async def _at(self, handle: Handle, op: str, deadline_s: float, **arguments: Any) -> Any:
        """What the node of a sandbox says. Raises NodeGone too."""
        peer = self._nodes.peer(_place(handle))
        return await self._persist(handle, lambda: peer.call(op, deadline_s, handle=stored(handle), **arguments))

    async def _ask_at(self, lease: Lease, op: str, /, **arguments: Any) -> Any:
        """What the node of a lease says. Raises NodeGone when it is not there any more."""
        entry = await self._nodes.entry(lease.node)
        if entry is None or entry.place is None:
            raise NodeGone(GONE) if entry is None else EngineUnavailable(f"the node {entry.host}: {entry.problem}")
        deadline = asyncio.get_running_loop().time() + LOOK_S
        while True:
            try:
                return await self._nodes.ask(entry, op, LOOK_S, **arguments)
            except Unreachable as error:
                if await self._nodes.gone(entry.place, refused=error.refused):
                    raise NodeGone(GONE) from None
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            except NotReady:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _persist(self, handle: Handle, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks again while the node may come back: its NodeHost is back within seconds. Raises NodeGone when the node
        is gone, or when the session has moved away from it; EngineUnavailable when neither is known in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOOK_S
        while True:
            if self._nodes.over(_place(handle)):
                raise NodeGone(GONE, sandbox=handle.sandbox_id)
            try:
                return await ask()
            except Unreachable as error:
                if await self._nodes.gone(_place(handle), refused=error.refused) or await self._moved(handle):
                    raise NodeGone(GONE, sandbox=handle.sandbox_id) from None
                if loop.time() >= deadline:
                    raise
            except NotReady:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _attached(self, handle: Handle) -> Channel:
        """A node that was cut off, or has only just started, cannot know whether it still has the session: then the
        head says it. So an old sandbox that is reachable again is not answered for while its session lives elsewhere.
        """
        try:
            channel = await ray_peer.attach(self._owner, _place(handle), handle)
        except NodeGone:
            raise
        except StateLost:  # a node that has heard that it is over ends its sandboxes: their files are gone, too
            if await self._moved(handle, over=False):
                raise NodeGone(GONE, sandbox=handle.sandbox_id) from None
            raise
        try:
            if not channel.sure and await self._moved(handle):
                raise NodeGone(GONE, sandbox=handle.sandbox_id)
        except BaseException:
            await channel.close()
            raise
        return channel

    async def _moved(self, handle: Handle, *, over: bool = True) -> bool:
        return await self._doubts.moved(handle.workspace, _place(handle), over=over)


def _place(handle: Handle) -> Place:
    try:
        return Place.parse(handle.node)
    except ValueError:
        raise StateLost(f"a sandbox of no cluster (node {handle.node!r:.80})", sandbox=handle.sandbox_id) from None


async def _finished(work: Coroutine[Any, Any, None]) -> None:
    """Waits for it even when cancelled again: what it cleans up would be left."""
    task = asyncio.create_task(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()
