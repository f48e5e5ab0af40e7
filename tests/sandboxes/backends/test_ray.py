"""The cluster backend over nodes in this process, with real sandboxes; the head and its leases are the test's."""

# ruff: noqa: ASYNC110 - what these wait for tells nobody

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sandboxes.backends import ray, ray_doubts, ray_local, ray_names, ray_nodes, ray_peer
from sandboxes.backends.base import Life
from sandboxes.backends.ray import RayBackend
from sandboxes.backends.ray_leases import Lease, Leases
from sandboxes.backends.ray_names import LocalSettings, NodeSettings, lease_name
from sandboxes.backends.ray_node import Node
from sandboxes.client import AgentClient
from sandboxes.errors import BackendError, EngineUnavailable, NoCapacity, NodeGone, StateLost
from sandboxes.owner import Owner
from sandboxes.spec import Handle
from tests.sandboxes.backends.bubblewrap_host import SMALL, environment
from tests.sandboxes.backends.bubblewrap_host import Host as LocalHost

pytestmark = pytest.mark.bubblewrap

OWNER = Owner("0123456789abcdef", b"k" * 32)
SOON_S = 30.0


class Head(Leases):
    """What the head knows, in memory. `down`: it does not answer. Nodes are added by `Cluster`."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}  # name → id and node of a lease
        self.alive: dict[str, Node] = {}
        self.given_up: dict[str, Node] = {}
        self.silent: set[str] = set()  # nodes that do not answer it
        self.raylets: dict[str, asyncio.Server] = {}
        self.down = False
        self.asked = 0  # where a lease is
        self.answering = asyncio.Event()
        self.answering.set()
        self.capacity = 100
        self._ids = itertools.count(1)

    @property
    def connected(self) -> bool:
        return not self.down

    async def open(self) -> None:
        self._answer()

    async def close(self) -> None:
        pass

    async def nodes(self, again: Sequence[str] = (), *, renew: bool = False) -> list[dict[str, Any]]:
        self._answer()
        return [
            {
                "node": ident,
                "host": "127.0.0.1",
                "raylet": self.raylets[ident].sockets[0].getsockname()[1],
                "capacity": self.capacity,
                "place": None if ident in self.silent else str(node.place),
                "problem": node.problem,
            }
            for ident, node in self.alive.items()
        ]

    async def dead(self, nodes: Sequence[str]) -> list[str]:
        self._answer()
        return [ident for ident in nodes if ident in self.given_up]

    async def lease(self, name: str, avoid: Sequence[str] = ()) -> Lease:
        self._answer()
        if name in self.known:
            return Lease(*self.known[name])
        used = [node for _, node in self.known.values()]
        free = [ident for ident in self.alive if ident not in avoid and used.count(ident) < self.capacity]
        if not free:
            raise NoCapacity("at capacity")
        self.known[name] = (f"{next(self._ids):032x}", min(free, key=used.count))
        return Lease(*self.known[name], fresh=True)

    async def find(self, name: str) -> Lease | None:
        self.asked += 1
        self._answer()
        await self.answering.wait()
        return Lease(*self.known[name]) if name in self.known else None

    async def remove(self, lease: str) -> None:
        self._answer()
        self.release(lease)

    def release(self, lease: str) -> None:
        self.known = {name: known for name, known in self.known.items() if known[0] != lease}

    def give_up(self, ident: str) -> None:
        """The node is dead: its leases move."""
        self.given_up[ident] = self.alive.pop(ident)
        others = itertools.cycle(self.alive)
        self.known = {
            name: (lease, next(others) if node == ident else node) for name, (lease, node) in self.known.items()
        }

    async def told(self, ident: str) -> None:
        """A node hears of its leases."""
        held = {
            str(ray_names.workspace_of(OWNER.id, name)): lease
            for name, (lease, node) in self.known.items()
            if node == ident
        }
        await self.alive[ident].leases(held, time.monotonic())

    def _answer(self) -> None:
        if self.down:
            raise EngineUnavailable("the head is away")


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.head = Head()
        self.nodes: list[Node] = []
        self.settings: dict[str, LocalSettings] = {}

    async def add(self, ident: str) -> None:
        place = self.directory / ident[:4]
        self.settings[ident] = LocalSettings(
            state_dir=str(place), environment=environment(), agent=str(self.directory / "agent"), grace_s=0.3, fence_s=5
        )
        settings = NodeSettings(owner_file="", local=self.settings[ident])
        node = Node(
            settings,
            OWNER,
            node=ident[: ray_names.SHORT],
            host="127.0.0.1",
            capacity=10,
            release=self.head.release,
        )
        await node.open()
        self.nodes.append(node)
        self.head.alive[ident] = node
        self.head.raylets[ident] = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)

    async def kill(self, ident: str) -> None:
        """As the machine's end: nothing listens there any more. The head has not noticed."""
        self.head.raylets[ident].close()
        await self.head.alive[ident].close()

    def node_of(self, handle: Handle) -> str:
        return next(ident for ident, node in self.head.alive.items() if str(node.place) == handle.node)

    def other(self, handle: Handle) -> str:
        return next(ident for ident, node in self.head.alive.items() if str(node.place) != handle.node)


ONE, TWO = "1" * 56, "2" * 56


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    LocalHost.make(tmp_path, os.geteuid())
    made = Cluster(tmp_path)
    for ident in (ONE, TWO):
        await made.add(ident)
    yield made
    for node in made.nodes:
        await node.close()
    for server in made.head.raylets.values():
        server.close()
    for settings in made.settings.values():
        local = ray_local.create(settings, OWNER, ray_local.root(settings, OWNER, "127.0.0.1"))
        await local.open()
        for handle in await local.list_owned():
            await local.destroy(handle)
        await local.close()


@pytest.fixture
async def backend(cluster: Cluster) -> AsyncIterator[RayBackend]:
    made = RayBackend(owner=OWNER, node=NodeSettings(owner_file=""), leases=cluster.head)
    await made.open()
    yield made
    await made.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.02)


async def launch(backend: RayBackend, number: int = 1) -> Handle:
    return await backend.launch(f"k-{number}", SMALL, f"k-{number}")


async def answers(backend: RayBackend, handle: Handle) -> bool:
    client = await AgentClient.connect(await backend.connect(handle))
    await client.close()
    return client.hello.sandbox == handle.sandbox_id


async def test_sessions_live_on_both_nodes_and_are_listed_together(cluster: Cluster, backend: RayBackend) -> None:
    handles = [await launch(backend, number) for number in range(4)]
    assert len({handle.node for handle in handles}) == 2
    assert sorted(await backend.list_owned(), key=lambda handle: handle.key) == handles
    assert await backend.list_workspaces() == [handle.workspace for handle in handles]
    for handle in handles:
        assert await answers(backend, handle)
        await backend.destroy(handle)
    await eventually(lambda: cluster.head.known == {})


async def test_the_loss_of_a_node_is_told_before_the_head_has_noticed(cluster: Cluster, backend: RayBackend) -> None:
    handle, kept = await launch(backend, 1), await launch(backend, 2)
    lost = cluster.node_of(handle)
    await cluster.kill(lost)
    for asked in (backend.connect(handle), backend.poll(handle), backend.usage(handle)):
        with pytest.raises(NodeGone):
            await asyncio.wait_for(asked, 5)
    assert await answers(backend, kept)
    cluster.head.give_up(lost)
    again = await launch(backend, 1)
    assert again.node != handle.node and again.sandbox_id != handle.sandbox_id
    await backend.destroy(handle)  # the old one: its successor is left alone
    await backend.destroy(handle, keep_workspace=True)
    assert await answers(backend, again)
    with pytest.raises(NodeGone):
        await backend.connect(handle)


async def test_a_lease_that_has_moved_is_not_taken_for_a_fresh_session(cluster: Cluster, backend: RayBackend) -> None:
    handle = await launch(backend)
    lost = cluster.node_of(handle)
    await cluster.kill(lost)
    cluster.head.give_up(lost)
    with pytest.raises(NodeGone):
        await backend.lookup("k-1")
    again = await launch(backend)
    assert await backend.lookup("k-1") == again


async def test_a_session_that_ends_after_its_node_gives_its_lease_back(cluster: Cluster, backend: RayBackend) -> None:
    handle = await launch(backend)
    lost = cluster.node_of(handle)
    await cluster.kill(lost)
    cluster.head.give_up(lost)
    await backend.destroy(handle)
    await eventually(lambda: cluster.head.known == {})


async def test_a_node_in_its_next_life_knows_no_handles_of_the_last(cluster: Cluster, backend: RayBackend) -> None:
    handle = await launch(backend)
    with pytest.raises(NodeGone):
        await backend.connect(dataclasses.replace(handle, node=f"{handle.node.partition('/')[0]}/{'f' * 12}"))
    with pytest.raises(StateLost):
        await backend.connect(dataclasses.replace(handle, node=""))


async def test_what_runs_is_reached_while_the_head_is_away(cluster: Cluster, backend: RayBackend) -> None:
    handle = await launch(backend)
    cluster.head.down = True
    assert await answers(backend, handle)
    assert (await backend.poll(handle)).life is Life.RUNNING
    assert await backend.list_owned() == [handle]
    with pytest.raises(EngineUnavailable):
        await launch(backend, 2)
    async with asyncio.timeout(SOON_S):
        while backend.head_answers:
            await asyncio.sleep(0.05)
    assert [info.host for info in backend.nodes()] == ["127.0.0.1"] * 2
    await backend.destroy(handle)
    assert await backend.list_owned() == []


@pytest.fixture
async def unaware(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RayBackend]:
    """A replica that has not heard of nodes since it was opened."""
    monkeypatch.setattr(ray_nodes, "REFRESH_S", 3600)
    made = RayBackend(owner=OWNER, node=NodeSettings(owner_file=""), leases=cluster.head)
    await made.open()
    yield made
    await made.close()


async def test_an_old_sandbox_that_is_reachable_again_is_not_taken_for_its_session(
    cluster: Cluster, unaware: RayBackend
) -> None:
    """As after a lost link: the head has given the node up, which does not know it, and neither does this replica."""
    handle, kept = await launch(unaware, 1), await launch(unaware, 2)
    cluster.head.give_up(cluster.node_of(handle))
    for asked in (unaware.connect(handle), unaware.poll(handle)):
        with pytest.raises(NodeGone):
            await asked
    assert await answers(unaware, kept)
    assert (await unaware.poll(kept)).life is Life.RUNNING
    cluster.head.known.clear()  # the session is over
    with pytest.raises(NodeGone):
        await unaware.connect(handle)


async def test_an_old_sandbox_that_was_ended_is_lost_with_its_node(cluster: Cluster, unaware: RayBackend) -> None:
    handle = await launch(unaware)
    lost = cluster.node_of(handle)
    cluster.head.give_up(lost)
    node = cluster.head.given_up[lost]
    await node._end(next(iter(await node._local.list_owned())), moved=True)
    for asked in (unaware.connect(handle), unaware.poll(handle)):
        with pytest.raises(NodeGone):
            await asked


async def test_what_was_destroyed_is_gone_and_not_moved(cluster: Cluster, unaware: RayBackend) -> None:
    handle = await launch(unaware)
    await unaware.destroy(handle)
    await eventually(lambda: cluster.head.known == {})
    assert (await unaware.poll(handle)).life is Life.GONE
    with pytest.raises(StateLost) as lost:
        await unaware.connect(handle)
    assert not isinstance(lost.value, NodeGone)


async def test_the_head_is_not_asked_for_what_a_node_is_sure_of(cluster: Cluster, unaware: RayBackend) -> None:
    handle = await launch(unaware)
    await cluster.head.told(cluster.node_of(handle))
    assert await answers(unaware, handle)
    assert (await unaware.poll(handle)).life is Life.RUNNING
    assert cluster.head.asked == 0


async def test_what_a_node_was_sure_of_is_not_relied_on_when_it_was_long_on_its_way(
    cluster: Cluster, unaware: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await launch(unaware)
    await cluster.head.told(cluster.node_of(handle))
    monkeypatch.setattr(ray_peer, "JUST_S", 0.0)
    cluster.head.give_up(cluster.node_of(handle))
    for asked in (unaware.connect(handle), unaware.poll(handle)):
        with pytest.raises(NodeGone):
            await asked


async def test_a_head_that_owes_an_answer_is_waited_for_once(
    cluster: Cluster, unaware: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_doubts, "HEAD_S", 0.1)
    handle = await launch(unaware)
    cluster.head.answering.clear()
    for _ in range(3):
        assert await answers(unaware, handle)
    assert cluster.head.asked == 1
    cluster.head.answering.set()
    await eventually(lambda: not unaware._doubts._owed)
    cluster.head.give_up(cluster.node_of(handle))
    with pytest.raises(NodeGone):
        await unaware.connect(handle)


async def test_a_node_that_the_head_has_declared_dead_is_told_and_ends_its_sandboxes(
    cluster: Cluster, backend: RayBackend
) -> None:
    handle, kept = await launch(backend, 1), await launch(backend, 2)
    known = set(cluster.head.known)
    lost = cluster.node_of(handle)
    cluster.head.silent.add(lost)
    await backend._nodes.refresh()
    cluster.head.give_up(lost)
    await backend._nodes.refresh()
    async with asyncio.timeout(SOON_S):
        while await cluster.head.given_up[lost]._local.list_owned():
            await asyncio.sleep(0.05)
    assert set(cluster.head.known) == known
    assert await answers(backend, kept)


async def test_a_node_that_the_head_only_does_not_know_is_told_nothing(cluster: Cluster, backend: RayBackend) -> None:
    """As a head that is back without its tables: that is no word on what runs."""
    handle = await launch(backend)
    node = cluster.head.alive.pop(cluster.node_of(handle))
    await backend._nodes.refresh()
    await asyncio.sleep(0.5)
    assert len(await node._local.list_owned()) == 1 and not backend._nodes._over._telling


async def test_a_drained_node_gets_nothing_new_and_keeps_what_it_has(cluster: Cluster, backend: RayBackend) -> None:
    kept = await launch(backend, 1)
    ident = cluster.node_of(kept)
    await backend.drain(ident[:8])
    assert [info.draining for info in backend.nodes()].count(True) == 1
    # Also where this host has not heard of it yet.
    other = RayBackend(owner=OWNER, node=NodeSettings(owner_file=""), leases=cluster.head)
    await other.open()
    other._nodes._entries = {
        name: dataclasses.replace(entry, draining=False) for name, entry in other._nodes._entries.items()
    }
    assert all([(await launch(host, number)).node != kept.node for host in (backend, other) for number in (2, 3, 4)])
    assert await launch(backend, 1) == kept
    await other.close()
    with pytest.raises(BackendError, match="no node"):
        await backend.drain("somewhere")


async def test_a_launch_that_fails_gives_its_lease_back(
    cluster: Cluster, backend: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*arguments: object) -> Handle:
        raise NoCapacity("the machine refused")

    for node in cluster.nodes:
        monkeypatch.setattr(node._local, "launch", full)
    with pytest.raises(NoCapacity, match="at capacity"):
        await launch(backend)
    await eventually(lambda: cluster.head.known == {})


async def test_a_cancelled_launch_leaves_neither_sandbox_nor_lease(cluster: Cluster, backend: RayBackend) -> None:
    for pause_s in (0, 0.001, 0.005, 0.02):
        task = asyncio.create_task(launch(backend))
        await asyncio.sleep(pause_s)
        task.cancel()
        ended = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(ended, Handle):
            await backend.destroy(ended)
        assert await backend.list_owned() == []
    await eventually(lambda: cluster.head.known == {})


async def test_a_node_that_cannot_isolate_is_passed_over(cluster: Cluster, backend: RayBackend) -> None:
    cluster.head.alive[ONE].problem, cluster.head.alive[ONE]._opened = "no bubblewrap here", False
    await backend._nodes.refresh()
    handles = [await launch(backend, number) for number in range(3)]
    assert {cluster.node_of(handle) for handle in handles} == {TWO}
    assert len(await backend.list_owned()) == 3
    assert [info.problem for info in backend.nodes()] == ["no bubblewrap here", ""]
    cluster.head.alive[ONE]._opened = True


async def test_a_node_host_that_is_back_in_a_moment_is_waited_for(
    cluster: Cluster, backend: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await launch(backend)
    ident = cluster.node_of(handle)
    node = cluster.head.alive[ident]
    raylet = cluster.head.raylets[ident]
    await node.close()
    reached = asyncio.create_task(answers(backend, handle))
    await asyncio.sleep(0.5)
    await cluster.add(ident)
    cluster.head.raylets[ident].close()
    cluster.head.raylets[ident] = raylet
    assert await asyncio.wait_for(reached, SOON_S)


async def test_a_node_that_only_does_not_answer_is_not_called_gone(
    cluster: Cluster, backend: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "LOOK_S", 1.0)
    handle = await launch(backend)
    node = cluster.head.alive[cluster.node_of(handle)]
    await node.close()  # its relay is closed; Ray's own process is there
    with pytest.raises(EngineUnavailable):
        await backend.poll(handle)
    assert await backend._leases.find(lease_name(OWNER.id, "k-1")) is not None


async def test_what_nodes_say_is_kept_fresh_in_the_background(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "REFRESH_S", 0.1)
    made = RayBackend(owner=OWNER, node=NodeSettings(owner_file=""), leases=cluster.head)
    await made.open()
    await launch(made)
    await eventually(lambda: sum(info.sandboxes for info in made.nodes()) == 1)
    await made.close()
