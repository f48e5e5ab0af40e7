"""A backend without isolation, in this process, for tests of everything above the contract.

A `FakeEngine` is what stays when a host ends: give the same one to the next `FakeBackend`. Its switches make it slow,
deaf or failing, one operation at a time; those of a `FakeAgent` make a sandbox so. With nodes it is a cluster, which
several hosts share; a node can be lost, with what ran there and its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sandboxes.backends.base import Backend, Life, Problem, Status, StreamChannel
from sandboxes.errors import NoCapacity, NodeGone, SandboxError, StateLost
from sandboxes.owner import Owner
from sandboxes.spec import Handle, SandboxSpec, Usage
from sandboxes.testing.fake_agent import FakeAgent

# What a fake does not give: see docs/isolation.md. Contract tests consult these names.
DIFFERENCES = frozenset({"no-isolation", "no-shell", "one-process"})


@dataclass(eq=False)
class FakeSandbox:
    """What the engine has of one sandbox."""

    handle: Handle
    owner: str
    agent: FakeAgent
    ended: str | None = None


class FakeEngine:
    """`hangs`: operations that never return; `fails`: what others raise; `delays_s`: before others go on; `calls`
    counts; `capacity`: sandboxes that fit; `launched`: handles, in order."""

    def __init__(self, nodes: Sequence[str] = ()) -> None:
        self.nodes = list(nodes)
        self.lost_nodes: set[str] = set()
        self.launched: list[Handle] = []
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.workspaces: dict[str, dict[str, bytes]] = {}
        self.hangs: set[str] = set()
        self.fails: dict[str, SandboxError] = {}
        self.delays_s: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self.capacity: int | None = None
        self.most = 0

    async def passing(self, operation: str) -> None:
        """What every operation goes through."""
        self.calls[operation] += 1
        if operation in self.fails:
            raise self.fails[operation]
        if operation in self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self.delays_s.get(operation, 0))

    def lose_node(self, node: str) -> None:
        """What ran there is gone, and its files are."""
        self.nodes.remove(node)
        self.lost_nodes.add(node)
        for found in list(self.sandboxes.values()):
            if found.handle.node == node:
                found.agent.die("its node is gone")
        for place in [place for place in self.workspaces if place.startswith(f"{node}/")]:
            del self.workspaces[place]

    def node(self) -> str:
        """Where the next sandbox goes: the node that has the fewest."""
        load = Counter(found.handle.node for found in self.sandboxes.values() if found.ended is None)
        return min(self.nodes, key=lambda node: (load[node], node), default="")

    def of(self, key: str) -> FakeSandbox | None:
        return next((found for found in self.sandboxes.values() if found.handle.key == key), None)


class FakeBackend(Backend):
    """See the module."""

    name = "fake"

    def __init__(self, owner: Owner, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine()
        self.shared = bool(self.engine.nodes)
        self._owner = owner

    async def open(self, *, launching: bool = True) -> None:
        await self.engine.passing("open")

    async def close(self) -> None: ...

    async def probe(self) -> Sequence[Problem]:
        return [Problem("the fake backend isolates nothing", "use another one")]

    @property
    def differences(self) -> frozenset[str]:
        return DIFFERENCES

    async def launch(self, key: str, spec: SandboxSpec, workspace: str) -> Handle:
        await self.engine.passing("launch")
        found = self.engine.of(key)
        if found is not None and found.ended is None:
            return found.handle
        if found is not None:
            self.engine.sandboxes.pop(found.handle.sandbox_id)
        if self.engine.capacity is not None and len(self.engine.sandboxes) >= self.engine.capacity:
            raise NoCapacity("the fake engine is full")
        ident = secrets.token_hex(8)
        handle = Handle(
            self.name, key, ident, secrets.token_hex(4), workspace, node=self.engine.node(), created_at=time.time()
        )
        self.engine.launched.append(handle)
        files = self.engine.workspaces.setdefault(_place(handle), {})
        agent = FakeAgent(ident, self._owner.nonce(ident), files, lambda detail: self._note_end(ident, detail))
        self.engine.sandboxes[ident] = FakeSandbox(handle, self._owner.id, agent)
        self.engine.most = max(self.engine.most, len(self.engine.sandboxes))
        return handle

    def _check_node(self, handle: Handle) -> None:
        if handle.node in self.engine.lost_nodes:
            raise NodeGone(f"its node {handle.node} is gone", sandbox=handle.sandbox_id)

    def _note_end(self, ident: str, detail: str) -> None:
        self.engine.sandboxes[ident].ended = detail

    async def lookup(self, key: str) -> Handle | None:
        await self.engine.passing("lookup")
        found = self.engine.of(key)
        return found.handle if found is not None and found.ended is None else None

    async def connect(self, handle: Handle) -> StreamChannel:
        await self.engine.passing("connect")
        self._check_node(handle)
        found = self.engine.sandboxes.get(handle.sandbox_id)
        if found is None or found.ended is not None or found.handle.instance != handle.instance:
            raise StateLost("the sandbox is not running", sandbox=handle.sandbox_id)
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(theirs.close)
            served = await asyncio.open_connection(sock=theirs, limit=1 << 26)
            # Before its socket: else the loop goes on to watch a number that is the next socket's, and not that one.
            undo.callback(served[1].close)
            reader, writer = await asyncio.open_connection(sock=ours)
            undo.pop_all()
        found.agent.serve(*served)
        return StreamChannel(reader, writer, self._owner.nonce(handle.sandbox_id))

    async def poll(self, handle: Handle) -> Status:
        await self.engine.passing("poll")
        self._check_node(handle)
        found = self.engine.sandboxes.get(handle.sandbox_id)
        if found is None:
            return Status(Life.GONE)
        return Status(Life.RUNNING) if found.ended is None else Status(Life.ENDED, found.ended)

    async def usage(self, handle: Handle) -> Usage:
        await self.engine.passing("usage")
        if handle.sandbox_id not in self.engine.sandboxes:
            raise StateLost("the sandbox is not running", sandbox=handle.sandbox_id)
        return Usage(memory_bytes=1 << 20, cpu_s=0.0, processes=2)

    async def destroy(self, handle: Handle, *, keep_workspace: bool = False) -> None:
        await self.engine.passing("destroy")
        found = self.engine.sandboxes.pop(handle.sandbox_id, None)
        if found is not None:
            await found.agent.end()
        if not keep_workspace:
            self.engine.workspaces.pop(_place(handle), None)

    async def remove_workspace(self, workspace: str) -> None:
        await self.engine.passing("remove_workspace")
        for place in [place for place in self.engine.workspaces if place.rpartition("/")[2] == workspace]:
            del self.engine.workspaces[place]

    async def list_owned(self) -> Sequence[Handle]:
        await self.engine.passing("list_owned")
        return [found.handle for found in self.engine.sandboxes.values() if found.owner == self._owner.id]

    async def list_workspaces(self) -> Sequence[str]:
        await self.engine.passing("list_workspaces")
        return sorted(self.engine.workspaces)


def _place(handle: Handle) -> str:
    return f"{handle.node}/{handle.workspace}" if handle.node else handle.workspace
