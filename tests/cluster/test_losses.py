"""What happens when a node, its link or the head is lost: to calls that run, to their sessions, and to the others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from sandboxes.spec import KeyKind, SessionKey
from tests.cluster.conftest import (
    Timed,
    again_until,
    call,
    collected,
    places,
    sandboxes,
    session,
    stretch,
    timed,
)
from tests.e2e.operating import admin, counts
from tests.support.cluster import Cluster, ray_cluster
from tests.support.machines import Machine
from tests.support.replica import Replica
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SOME = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(tmp_path_factory.mktemp("losses"), workers=2, resources={"toolhost_session": 30}) as made:
        yield made


@pytest.fixture(scope="module")
def replica(cluster: Cluster) -> Iterator[Replica]:
    made = Replica(cluster, 1)
    made.start()
    yield made
    made.kill()


def digest(name: str) -> str:
    return SessionKey("anonymous", KeyKind.RETAINED, session(name)).digest()


async def spread(cluster: Cluster, replica: Replica, prefix: str) -> dict[Machine, list[str]]:
    """Sessions with `x = NAME`, and on which machine each is: both workers are up and have some, and no others."""
    states = await asyncio.to_thread(cluster.nodes)
    for machine in cluster.workers:
        if states.get(machine.name) != "ALIVE":  # an earlier test did not get so far
            machine.kill()
            await back(cluster, replica, machine)
    await admin(replica, "/close", "POST", {"all": True})
    await until(lambda: sandboxes(cluster.workers) == [0, 0], "sandboxes of an earlier test", 60)
    names: list[str] = []
    found: dict[Machine, list[str]] = {}
    while not all(len(found.get(worker, ())) >= SOME for worker in cluster.workers):
        assert len(names) < 10 * SOME, f"they are not spread: {found}"
        names.append(f"{prefix}{len(names)}")
        assert "Traceback" not in await call(replica, names[-1], f"x = '{names[-1]}'")
        where = await places(replica)
        found = {worker: [n for n in names if where[digest(n)] == worker.address] for worker in cluster.workers}
    return found


class OldHandles:
    """`old_handles` on the edge: what is told to who has a handle of before."""

    def __init__(self, cluster: Cluster, replica: Replica) -> None:
        self._running = cluster.popen(
            cluster.edge,
            [sys.executable, "-m", "tests.cluster.old_handles"],
            environment=replica.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._read() == "ready"

    def _read(self) -> Any:
        assert self._running.stdout is not None
        return json.loads(self._running.stdout.readline())

    def ask(self, command: str) -> Any:
        assert self._running.stdin is not None
        self._running.stdin.write(f"{command}\n".encode())
        self._running.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._running.close()


@pytest.fixture
def handles(cluster: Cluster, replica: Replica) -> Iterator[OldHandles]:
    made = OldHandles(cluster, replica)
    yield made
    made.close()


def gone(text: str) -> bool:
    """Whether a text says that both variables and files are gone."""
    return "variables and files are gone" in text.lower()


async def epoch(replica: Replica, name: str, attempt: str) -> int:
    return int((await collected(replica, name, attempt))["receipt"]["epoch"])


async def test_a_killed_node(cluster: Cluster, replica: Replica, handles: OldHandles) -> None:
    where = await spread(cluster, replica, "killed")
    lost, kept = cluster.workers
    name, idle, *_ = where[lost]
    kept_handles = await asyncio.to_thread(handles.ask, "keep")
    assert {lost.address, kept.address} <= set(kept_handles)
    running = asyncio.create_task(call(replica, name, "import time; time.sleep(100)", attempt="running"))
    await again_until(lambda: busy(replica), lambda number: number == 1, 20, "it never ran")
    began = time.monotonic()
    lost.kill()
    ended = await timed(running, began)
    receipt = (await collected(replica, name, "running"))["receipt"]
    assert (receipt["ending"], receipt["state"], receipt["epoch"]) == ("lost", "lost", 1)
    assert gone(ended.value), ended.value
    others = await asyncio.gather(*(call(replica, other, "x") for other in where[kept]))
    assert others == [f"'{other}'" for other in where[kept]], "the other node's sessions are unaffected"

    async def next_call(of: str) -> Timed:
        return await timed(call(replica, of, "globals().get('x', 'nothing')", attempt="next"), began)

    again, first = await asyncio.gather(next_call(name), next_call(idle))
    assert "'nothing'" in again.value and "'nothing'" in first.value
    assert gone(first.value), f"who was not told yet is told: {first.value}"
    assert [await epoch(replica, one, "next") for one in (name, idle)] == [2, 2]
    told = await asyncio.to_thread(handles.ask, "connect")
    assert told == ["NodeGone" if node == lost.address else "connected" for node in kept_handles]
    moved = await places(replica)
    assert {moved[digest(one)] for one in (name, idle)} == {kept.address}
    print(f"told {ended.s:.2f} s after the kill; the next calls answered {again.s:.2f} s and {first.s:.2f} s after it")
    ended.within(1)
    again.within(5)
    first.within(5)
    await back(cluster, replica, lost)


async def busy(replica: Replica) -> int:
    return (await counts(replica))["running"]


async def back(cluster: Cluster, replica: Replica, lost: Machine) -> None:
    """The machine is in the cluster again, and sessions come to it."""
    await asyncio.to_thread(cluster.start_node, lost)

    async def used() -> bool:
        await call(replica, f"back{time.monotonic():.3f}", "1")
        return sandboxes([lost]) != [0]

    await again_until(used, bool, 60, "no session came to the node that is back")


@pytest.mark.parametrize("longer_s", [0, 12])  # the longer it was lost, the later Ray notices there that it is back
async def test_a_lost_link(cluster: Cluster, replica: Replica, handles: OldHandles, longer_s: int) -> None:
    where = await spread(cluster, replica, f"cut{longer_s}-")
    lost, kept = cluster.workers
    name = where[lost][0]
    kept_handles = await asyncio.to_thread(handles.ask, "keep")
    instances: dict[tuple[str, int], set[str]] = defaultdict(set)
    turns = itertools.count()

    async def instance(of: str) -> bool:
        """Who answers for a session, and in which epoch."""
        attempt = f"who{next(turns)}"
        text = await call(
            replica, of, "import uuid; i = globals().setdefault('i', uuid.uuid4().hex); i", attempt=attempt
        )
        found = re.search(r"'([0-9a-f]{32})'", text)
        if found is None:
            return False
        instances[of, await epoch(replica, of, attempt)].add(found[1])
        return True

    names = [*where[lost][:2], where[kept][0]]
    for one in names:
        assert await instance(one)
    began = time.monotonic()
    lost.cut()

    async def moved() -> bool:
        return await instance(name) and (name, 2) in instances

    await again_until(moved, bool, 120, "it has not moved")
    moved_s = time.monotonic() - began
    assert sandboxes([lost])[0] > 0, "the old ones run on, where nobody can see them"
    told = await asyncio.to_thread(handles.ask, "connect")
    await asyncio.sleep(longer_s)
    lost.mend()
    healed, rounds = time.monotonic(), 1
    while (healing := time.monotonic() - healed) < 15 * stretch() and sandboxes([lost]) != [0]:
        told += await asyncio.to_thread(handles.ask, "connect")
        rounds += 1
        for one in names:
            await instance(one)
    print(f"moved {moved_s:.2f} s after the cut; {healing:.2f} s after the healing no old sandbox was left")
    assert sandboxes([lost]) == [0]
    refused = [text for node, text in zip(kept_handles * rounds, told, strict=True) if node == lost.address]
    assert refused and "connected" not in refused, "what has moved is not answered for by the old one"
    for one in names:
        assert await instance(one)
    assert {which: len(found) for which, found in instances.items() if len(found) != 1} == {}
    assert moved_s <= 10 * stretch()
    lost.kill()
    await back(cluster, replica, lost)


LEASES = """
import json, ray
from ray.util.placement_group import placement_group_table
ray.init("auto", log_to_driver=False, logging_level="ERROR")
print(json.dumps({one["name"]: one["bundles_to_node_id"] for one in placement_group_table().values()
                  if one["state"] == "CREATED" and one["name"].startswith("toolhost/")}))
"""


def leases(cluster: Cluster) -> dict[str, Any]:
    """Where each lease is, as the head says."""
    said = cluster.run(cluster.edge, [sys.executable, "-c", LEASES]).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


async def test_a_head_that_is_back_after_6_s(cluster: Cluster, replica: Replica) -> None:
    where = await spread(cluster, replica, "head")
    names = [name for found in where.values() for name in found]
    before = await asyncio.to_thread(leases, cluster)
    running = asyncio.create_task(call(replica, names[0], "import time; time.sleep(8); 'ended'"))
    cluster.head.kill()
    killed, answered = time.monotonic(), 0

    async def calls(until_s: float) -> None:
        nonlocal answered
        while time.monotonic() - killed < until_s:
            said = await asyncio.gather(*(call(replica, name, "x") for name in names[1:]))
            assert said == [f"'{name}'" for name in names[1:]]
            answered += len(said)

    await calls(6)
    waiting = asyncio.create_task(call(replica, "head-new", "'new'"))
    start = asyncio.create_task(asyncio.to_thread(cluster.start_head))
    while not start.done():
        await calls(time.monotonic() - killed + 0.1)
    await start
    assert await running == "'ended'"
    await waiting  # it was served, or told why not: both are answers
    assert "'newer'" in await again_until(
        lambda: call(replica, "head-newer", "'newer'"), lambda text: "'newer'" in text, 60, "no new session"
    )
    after = await asyncio.to_thread(leases, cluster)
    assert {name: place for name, place in after.items() if name in before} == before, (
        "all leases kept, in their places"
    )
    print(f"{answered} calls were answered while the head was away")
    assert answered > 20


async def test_a_head_that_is_away_for_90_s(cluster: Cluster) -> None:
    """With Ray's own patience of 60 s, after which it ends the process that speaks with it."""
    replica = Replica(cluster, 2, environment={"RAY_gcs_rpc_server_reconnect_timeout_s": "60"})
    replica.start()
    try:
        assert await call(replica, "away", "x = 41") != ""
        bridges = bridge_pids(cluster, replica)
        assert len(bridges) == 1
        cluster.head.kill()
        killed = time.monotonic()
        while time.monotonic() - killed < 90:
            assert await call(replica, "away", "x + 1") == "42"
            await asyncio.sleep(1)
        assert bridge_pids(cluster, replica) != bridges, "Ray has ended it"
        assert replica.running()
        told = await call(replica, "away-new", "1")
        print(told)
        assert "cluster" in told and "Nothing ran" in told
        assert "Ray" in replica.log_text()
        await asyncio.to_thread(cluster.start_head)
        assert "'new'" in await again_until(
            lambda: call(replica, "away-newer", "'new'"), lambda text: "'new'" in text, 90, "no new session"
        )
        assert await call(replica, "away", "x + 1") == "42"
    finally:
        replica.kill()


def bridge_pids(cluster: Cluster, replica: Replica) -> set[int]:
    """The processes by which this replica speaks with Ray."""
    found = set()
    for process in cluster.edge.processes():
        if "ray_bridge" in process.command:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(process.pid).ppid() == replica.inside_pid:
                    found.add(process.pid)
    return found
