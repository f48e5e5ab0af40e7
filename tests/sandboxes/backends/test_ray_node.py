"""What runs on a node of the cluster, with real bubblewrap and real agents; its head and leases are the test's."""

# ruff: noqa: ASYNC110 - what these wait for tells nobody

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxes.backends import ray_local, ray_peer
from sandboxes.backends.base import Backend
from sandboxes.backends.ray_names import LocalSettings, NodeSettings, Place, loaded, stored
from sandboxes.backends.ray_node import Node, spec_fields
from sandboxes.backends.ray_wire import Draining, LeaseGone
from sandboxes.client import AgentClient
from sandboxes.errors import EngineUnavailable, IsolationUnavailable, StateLost
from sandboxes.owner import Owner
from sandboxes.spec import Handle
from tests.sandboxes.backends.bubblewrap_host import SMALL, environment
from tests.sandboxes.backends.bubblewrap_host import Host as LocalHost

pytestmark = pytest.mark.bubblewrap

OWNER = Owner("0123456789abcdef", b"k" * 32)
NODE = "a" * 12
FENCE_S = 3.0
SOON_S = 30.0


class Machine:
    """A node that can be restarted. `released`: ids of leases that it gave back."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.released: list[str] = []
        self.options: dict[str, Any] = {}
        self.nodes: list[Node] = []
        self.peers: list[ray_peer.Peer] = []
        self.local = LocalSettings(
            state_dir=str(directory / "state"),
            environment=environment(),
            agent=str(directory / "agent"),
            grace_s=0.3,
            fence_s=FENCE_S,
        )

    async def start(self, local: Backend | None = None, node: str = NODE) -> ray_peer.Peer:
        made = Node(
            NodeSettings(owner_file="", local=self.local, **self.options),
            OWNER,
            node=node,
            host="127.0.0.1",
            capacity=10,
            release=self.released.append,
            local=local,
        )
        self.nodes.append(made)
        await made.open()
        assert made.place is not None
        self.peers.append(ray_peer.Peer(OWNER, made.place))
        return self.peers[-1]

    @property
    def node(self) -> Node:
        return self.nodes[-1]

    @property
    def place(self) -> Place:
        assert self.node.place is not None
        return self.node.place

    async def stop(self) -> None:
        await self.peers[-1].close()
        await self.node.close()

    async def clear(self) -> None:
        backend = ray_local.create(self.local, OWNER, ray_local.root(self.local, OWNER, "127.0.0.1"))
        await backend.open()
        for handle in await backend.list_owned():
            await backend.destroy(handle)
        await backend.close()


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    LocalHost.make(tmp_path, os.geteuid())
    made = Machine(tmp_path)
    yield made
    for peer in made.peers:
        await peer.close()
    for node in made.nodes:
        with contextlib.suppress(Exception):
            await node.close()
    await made.clear()


async def launch(peer: ray_peer.Peer, number: int = 1, lease: str = "") -> Handle:
    arguments = {"key": f"k-{number}", "workspace": f"w-{number}", "lease": lease or f"lease-{number}"}
    found = await peer.call("launch", 30, spec=spec_fields(SMALL), **arguments)
    return loaded(found["handle"])


async def connected(machine: Machine, handle: Handle) -> AgentClient:
    return await AgentClient.connect(await ray_peer.attach(OWNER, machine.place, handle))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.02)


async def running(peer: ray_peer.Peer, handle: Handle) -> bool:
    return (await peer.call("poll", 10, handle=stored(handle)))["life"] == "running"


async def test_launching_is_idempotent_and_names_the_node(machine: Machine) -> None:
    peer = await machine.start()
    first, second = await asyncio.gather(launch(peer), launch(peer))
    assert first == second == loaded(await peer.call("lookup", 10, key="k-1"))
    assert (first.backend, first.node) == ("ray", str(machine.place))
    assert await peer.call("list", 10) == [stored(first)]
    client = await connected(machine, first)
    assert client.hello.sandbox == first.sandbox_id
    await client.close()
    with pytest.raises(StateLost):
        await ray_peer.attach(OWNER, machine.place, dataclasses.replace(first, instance="another"))
    assert (await peer.call("usage", 10, handle=stored(first)))["processes"] >= 1


async def test_a_lease_is_given_back_with_the_files_and_not_before(machine: Machine) -> None:
    peer = await machine.start()
    handle = await launch(peer)
    await peer.call("destroy", 30, handle=stored(handle), keep_workspace=True)
    assert await peer.call("workspaces", 10) == ["w-1"]
    again = await launch(peer)
    assert again.instance != handle.instance
    await peer.call("destroy", 30, handle=stored(handle))  # of the one before: changes nothing
    assert await running(peer, again)
    assert machine.released == []
    await peer.call("destroy", 30, handle=stored(again), keep_workspace=True)
    await peer.call("remove_workspace", 30, workspace="w-1")
    await eventually(lambda: machine.released == ["lease-1"])
    with pytest.raises(LeaseGone):
        await launch(peer)
    assert await launch(peer, lease="lease-1b")


async def test_what_a_replica_does_not_need_is_given_back_unless_another_uses_it(machine: Machine) -> None:
    peer = await machine.start()
    await launch(peer, 1)
    for number in (1, 2):
        await peer.call("give_back", 10, workspace=f"w-{number}", lease=f"lease-{number}")
    await eventually(lambda: machine.released == ["lease-2"])


async def test_its_sandboxes_outlive_its_process_and_are_adopted_at_the_same_port(machine: Machine) -> None:
    peer = await machine.start()
    place = machine.place
    handle = await launch(peer)
    await machine.stop()
    peer = await machine.start()
    assert machine.place == place
    await asyncio.sleep(FENCE_S + 1.5)  # held by the new one alone
    assert await running(peer, handle)
    client = await connected(machine, handle)
    await client.ping()
    await client.close()


async def test_another_life_of_the_node_begins_with_nothing(machine: Machine) -> None:
    """The head has given the earlier one up: neither its sandboxes nor its files may come back under new leases."""
    peer = await machine.start()
    handle = await launch(peer)
    await launch(peer, 2)
    await peer.call("destroy", 30, handle=stored(handle), keep_workspace=True)
    assert len(await peer.call("workspaces", 10)) == 2
    await machine.stop()
    again = await machine.start(node="b" * 12)
    assert await again.call("list", 10) == []
    assert await again.call("workspaces", 10) == []
    assert await again.call("lookup", 10, key="k-2") is None


async def test_a_sandbox_whose_node_is_gone_ends_itself(machine: Machine) -> None:
    peer = await machine.start()
    handle = await launch(peer)
    await machine.stop()
    await asyncio.sleep(FENCE_S + 2)
    peer = await machine.start()
    assert not await running(peer, handle)


async def test_what_has_no_lease_here_any_more_is_ended_after_two_rounds(machine: Machine) -> None:
    peer = await machine.start()
    moved, kept = await launch(peer, 1), await launch(peer, 2)
    await machine.node.leases({"w-2": "lease-2"}, time.monotonic())
    assert await running(peer, moved)
    await machine.node.leases({"w-2": "lease-2"}, time.monotonic())
    assert not await running(peer, moved)
    assert await running(peer, kept)
    assert await peer.call("workspaces", 10) == ["w-2"]


async def test_a_lease_that_is_elsewhere_is_not_given_back(machine: Machine) -> None:
    """It keeps its id when it moves: given back here, it would be taken from the session there."""
    machine.options["patience_s"] = 0.0
    peer = await machine.start()
    await launch(peer, 1)
    for _ in range(2):
        await machine.node.leases({"w-2": "lease-2"}, time.monotonic())
    await launch(peer, 2)
    await machine.node.without_head()
    await launch(peer, 3)
    await machine.node.leases({}, time.monotonic() - 10)
    await peer.call("over", 30)
    assert await peer.call("list", 10) == []
    assert machine.node._tasks == set() and machine.released == []


async def test_it_is_sure_of_a_session_while_the_head_has_just_said_that_it_is_here(machine: Machine) -> None:
    peer = await machine.start()
    handle, other = await launch(peer, 1), await launch(peer, 2)

    async def sure(of: Handle) -> bool:
        channel = await ray_peer.attach(OWNER, machine.place, of)
        await channel.close()
        said: bool = (await peer.call("poll", 10, handle=stored(of)))["sure"]
        assert channel.sure is said
        return said

    assert not await sure(handle), "the head has said nothing yet"
    before = time.monotonic()
    await machine.node.leases({"w-1": "lease-1"}, before)
    assert await sure(handle) and not await sure(other), "the lease of the other is not here"
    assert await sure(await launch(peer, 3)), "it was launched since, with a lease that the head has placed here"
    await machine.node.leases({"w-1": "lease-1"}, time.monotonic())
    assert not await sure(loaded(await peer.call("lookup", 10, key="k-3"))), "the head says that it is not here"
    await machine.node.leases({"w-1": "lease-1"}, before - 10)
    assert not await sure(handle), "it was asked before it may have given the node up"


async def test_a_node_that_is_told_that_it_is_over_ends_what_the_head_has_not_just_confirmed(machine: Machine) -> None:
    peer = await machine.start()
    kept, moved = await launch(peer, 1), await launch(peer, 2)
    await machine.node.leases({"w-1": "lease-1"}, time.monotonic())
    await peer.call("over", 30)
    assert await peer.call("list", 10) == [stored(kept)]
    await machine.node.leases({"w-1": "lease-1"}, time.monotonic() - 10)
    await peer.call("over", 30)
    assert await peer.call("list", 10) == []
    with pytest.raises(StateLost):
        await ray_peer.attach(OWNER, machine.place, moved)


async def test_files_without_a_lease_are_removed_and_those_with_one_are_kept(machine: Machine) -> None:
    peer = await machine.start()
    for number in (1, 2):
        handle = await launch(peer, number)
        await peer.call("destroy", 30, handle=stored(handle), keep_workspace=True)
    for _ in range(3):
        await machine.node.leases({"w-2": "lease-2"}, time.monotonic())
    assert await peer.call("workspaces", 10) == ["w-2"]
    assert "lease-2" not in machine.released


async def test_a_lease_in_which_nothing_came_to_be_is_given_back(machine: Machine) -> None:
    machine.options["unused_s"] = 0.3
    peer = await machine.start()
    await launch(peer, 1)
    held = {"w-1": "lease-1", "w-empty": "lease-empty"}
    await machine.node.leases(held, time.monotonic())
    assert machine.released == []
    await asyncio.sleep(0.4)
    await machine.node.leases(held, time.monotonic())
    await eventually(lambda: machine.released == ["lease-empty"])


async def test_without_a_head_for_long_its_sandboxes_are_ended(machine: Machine) -> None:
    machine.options["patience_s"] = 0.5
    peer = await machine.start()
    handle = await launch(peer)
    await machine.node.leases({"w-1": "lease-1"}, time.monotonic())
    await machine.node.without_head()
    assert await running(peer, handle)
    await asyncio.sleep(0.6)
    await machine.node.without_head()
    assert not await running(peer, handle)


async def test_a_sandbox_that_no_tool_host_comes_to_is_ended(machine: Machine) -> None:
    machine.options["abandoned_s"] = 0.5
    peer = await machine.start()
    left, used = await launch(peer, 1), await launch(peer, 2)
    client = await connected(machine, used)
    await asyncio.sleep(0.6)
    await machine.node.leases({"w-1": "lease-1", "w-2": "lease-2"}, time.monotonic())
    assert not await running(peer, left)
    assert await running(peer, used)
    await client.close()


async def test_a_drained_node_keeps_what_it_has_and_takes_nothing_new_over_its_restart(machine: Machine) -> None:
    peer = await machine.start()
    handle = await launch(peer)
    await peer.call("drain", 10, draining=True)
    await machine.stop()
    peer = await machine.start()
    assert (await peer.call("status", 10))["draining"] is True
    with pytest.raises(Draining):
        await launch(peer, 2)
    assert await launch(peer) == handle
    await peer.call("destroy", 30, handle=stored(handle), keep_workspace=True)
    assert await launch(peer)  # its files are here
    await peer.call("drain", 10, draining=False)
    assert await launch(peer, 2)


async def test_a_launch_that_is_given_up_leaves_nothing(machine: Machine) -> None:
    peer = await machine.start()
    with pytest.raises(EngineUnavailable):
        await peer.call("launch", 0.002, key="k-1", workspace="w-1", lease="lease-1", spec=spec_fields(SMALL))
    async with asyncio.timeout(SOON_S):
        while await peer.call("list", 10) or machine.node._relay.tasks - {asyncio.current_task()}:
            await asyncio.sleep(0.05)


async def test_a_node_that_cannot_isolate_says_so_and_tries_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandboxes.backends.ray_node.OPEN_RETRY_S", 0.1)
    local = ray_local.create(machine.local, OWNER, ray_local.root(machine.local, OWNER, "127.0.0.1"))
    opening, fit = local.open, threading.Event()

    async def open_(**options: bool) -> None:
        if not fit.is_set():
            raise IsolationUnavailable("no bubblewrap here")
        await opening(**options)

    monkeypatch.setattr(local, "open", open_)
    peer = await machine.start(local)
    assert "no bubblewrap here" in (await peer.call("status", 10))["problem"]
    with pytest.raises(EngineUnavailable, match="no bubblewrap here"):
        await launch(peer)
    fit.set()
    await eventually(lambda: machine.node.problem == "")
    assert await launch(peer)
