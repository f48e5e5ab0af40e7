"""Sessions over a cluster with two tool hosts and a shared store: where they are, who reaches them, and who cannot."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import (
    again_until,
    call,
    collected,
    key,
    many,
    per_node,
    sandboxes,
    session,
    stretch,
    timed,
)
from tests.e2e.operating import admin, counts
from tests.support.cluster import Cluster, ray_cluster
from tests.support.machines import Machine
from tests.support.replica import Replica, owner_file
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ROOM = 55  # sessions a node takes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(tmp_path_factory.mktemp("sessions"), workers=2, resources={"toolhost_session": ROOM}) as made:
        yield made


@pytest.fixture(scope="module")
def replicas(cluster: Cluster) -> Iterator[list[Replica]]:
    made = [Replica(cluster, number) for number in (1, 2)]
    for replica in made:
        replica.start()
    yield made
    for replica in made:
        if replica.running():
            replica.kill()


@pytest.fixture
async def pair(cluster: Cluster, replicas: list[Replica]) -> list[Replica]:
    """Both replicas, alive, and a cluster without sessions."""
    for replica in replicas:
        if not replica.running():
            await asyncio.to_thread(replica.start)
    await admin(replicas[0], "/close", "POST", {"all": True})
    await until(lambda: sandboxes(cluster.workers) == [0, 0], "sandboxes of an earlier test", 60)
    return replicas


async def test_100_sessions_are_spread_and_one_over_capacity_is_told(cluster: Cluster, pair: list[Replica]) -> None:
    names = [f"spread{number}" for number in range(100)]
    said = await many(call(pair[number % 2], name, f"x = '{name}'; x") for number, name in enumerate(names))
    assert said == [f"'{name}'" for name in names]
    spread = sandboxes(cluster.workers)
    print("spread", spread)
    assert sum(spread) == 100
    assert all(40 <= number <= 60 for number in spread), spread
    more = [f"more{number}" for number in range(2 * ROOM - 100)]
    assert await many(call(pair[0], name, "1") for name in more) == ["1"] * len(more)
    told = await call(pair[1], "one-too-many", "1")
    assert "at capacity" in told and "Nothing ran" in told, told
    assert sandboxes(cluster.workers) == [ROOM, ROOM]
    assert await many(call(pair[(number + 1) % 2], name, "x") for number, name in enumerate(names)) == said, "from both"


async def test_two_replicas_race_for_20_keys(cluster: Cluster, pair: list[Replica]) -> None:
    names = [f"race{number}" for number in range(20)]
    code = "import uuid; i = globals().setdefault('i', uuid.uuid4().hex); i"
    said = await many((call(replica, name, code) for name in names for replica in pair), at_once=40)
    for number, name in enumerate(names):
        assert said[2 * number] == said[2 * number + 1], f"{name}: both got the same one"
    assert len(set(said)) == 20
    assert sum(sandboxes(cluster.workers)) == 20


async def test_a_replica_is_killed(cluster: Cluster, pair: list[Replica]) -> None:
    dying, other = pair
    assert "Traceback" not in await call(dying, "replica", "x = 42")
    running = asyncio.create_task(call(dying, "replica-runs", "import time; time.sleep(4); 'ended'", attempt="running"))

    async def runs() -> bool:
        return (await counts(dying))["running"] == 1

    await again_until(runs, bool, 30, "it never ran")
    await asyncio.to_thread(dying.kill)
    answered = await timed(call(other, "replica", "x"))
    print(f"another replica answered after {answered.s:.2f} s")
    assert answered.value == "42"
    answered.within(1)
    await asyncio.gather(running, return_exceptions=True)
    outcome = await collected(other, "replica-runs", "running")
    assert outcome["text"].splitlines()[0] == "'ended'"
    assert outcome["receipt"]["ending"] == "ok"


async def test_all_replicas_sessions_are_listed_with_their_nodes(cluster: Cluster, pair: list[Replica]) -> None:
    await many(call(pair[number % 2], f"listed{number}", "1") for number in range(6))
    hosts = {worker.address for worker in cluster.workers}
    for replica in pair:
        listed = (await admin(replica, "?limit=1000"))["sessions"]
        assert len(listed) == 6, "of both"
        assert {one["sandbox"]["node"].partition(":")[0] for one in listed} <= hosts
        table = cluster.run(
            cluster.edge,
            [sys.executable, "-m", "toolhost", "sessions", "list", "--url", f"http://{replica.inner}"],
        ).stdout
        assert len(table.splitlines()) == 6
        assert all(any(host in line for host in hosts) for line in table.splitlines()), table


async def test_a_killed_node_host_comes_back_with_its_sandboxes(cluster: Cluster, pair: list[Replica]) -> None:
    names = [f"host{number}" for number in range(6)]
    await many(call(pair[0], name, f"x = '{name}'") for name in names)
    (worker, host) = next((w, p) for w in cluster.workers for p in w.processes() if "NodeHost" in p.command)
    before = sandboxes(cluster.workers)
    os.kill(host.pid, signal.SIGKILL)
    said = await timed(many(call(pair[number % 2], name, "x") for number, name in enumerate(names)))
    print(f"all sessions answered {said.s:.2f} s after the kill of a NodeHost")
    assert said.value == [f"'{name}'" for name in names], "variables are kept"
    assert sandboxes(cluster.workers) == before
    said.within(3)  # whoever has a session reaches it past the NodeHost, which need not be back by then
    there = sandboxes([worker])

    async def used() -> bool:
        await call(pair[0], f"back{time.monotonic()}", "1")
        return sandboxes([worker]) > there

    await again_until(used, bool, 30, "the node gets no sessions again")
    assert [p.pid for p in worker.processes() if "NodeHost" in p.command] != [host.pid]


async def test_a_drained_node_keeps_what_it_has_and_gets_no_more(cluster: Cluster, pair: list[Replica]) -> None:
    names = [f"drain{number}" for number in range(6)]
    await many(call(pair[0], name, f"x = '{name}'") for name in names)
    drained = cluster.workers[0]
    before = sandboxes([drained])[0]
    assert before > 0
    status = {one["host"]: one for one in json.loads(toolhost_cluster(cluster, "status", "--json"))["nodes"]}
    assert [status[one.address]["sandboxes"] for one in cluster.workers] == sandboxes(cluster.workers)
    toolhost_cluster(cluster, "drain", drained.address)
    more = [f"drained{number}" for number in range(10)]
    assert await many(call(pair[number % 2], name, "1") for number, name in enumerate(more)) == ["1"] * 10
    assert sandboxes([drained]) == [before], "new ones are elsewhere"
    said = await many(call(pair[number % 2], name, "x") for number, name in enumerate(names))
    assert said == [f"'{name}'" for name in names], "old ones are kept"
    waiting = asyncio.create_task(asyncio.to_thread(toolhost_cluster, cluster, "drain", drained.address, "--wait"))
    await asyncio.sleep(3)
    assert not waiting.done()
    await admin(pair[0], "/close", "POST", {"all": True})
    assert "is empty" in await waiting
    toolhost_cluster(cluster, "drain", drained.address, "--undo")

    async def used() -> bool:
        await call(pair[0], f"undone{time.monotonic()}", "1")
        return sandboxes([drained]) != [0]

    await again_until(used, bool, 30, "the node gets no sessions again")


def toolhost_cluster(cluster: Cluster, *arguments: str) -> str:
    settings = {
        "TOOLHOST_RAY__ADDRESS": cluster.address,
        "TOOLHOST_RAY__TOKEN_FILE": str(cluster.token_file),
        "TOOLHOST_RAY__OWNER_FILE": str(owner_file(cluster)),
        "TOOLHOST_STATE_DIR": "/tmp/operator",
    }
    done = cluster.run(
        cluster.edge, [sys.executable, "-m", "toolhost", "cluster", *arguments], environment=settings, timeout=120
    )
    return str(done.stdout)


# It asks for a lease, and dies before it could launch anything in it.
LEASE = """
import asyncio, os, signal
from sandboxes.backends.ray_names import lease_name
from toolhost.backends import create_backend, owner_of
from toolhost.config import load
async def main():
    settings = load(None, {"sandbox": {"backend": "ray"}})
    owner = owner_of(settings)
    backend = create_backend(settings, owner)
    await backend.open()
    lease = await backend._leases.lease(lease_name(owner.id, "never-launched"))
    print(lease.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
LEASED = """
import ray
from ray.util.placement_group import placement_group_table
ray.init("auto", log_to_driver=False, logging_level="ERROR")
print(*(ident for ident, one in placement_group_table().items() if one["state"] == "CREATED"))
"""


async def test_the_lease_of_a_replica_that_died_before_it_launched_is_swept(
    cluster: Cluster, pair: list[Replica]
) -> None:
    asked = cluster.run(
        cluster.edge, [sys.executable, "-c", LEASE], environment=pair[0].environment, check=False, timeout=120
    )
    lease = asked.stdout.split()[-1]
    assert asked.returncode == -signal.SIGKILL or asked.returncode == 128 + signal.SIGKILL, asked.stderr[-2000:]

    def leased() -> str:
        return str(cluster.run(cluster.edge, [sys.executable, "-c", LEASED], timeout=120).stdout)

    assert lease in await asyncio.to_thread(leased)

    async def swept() -> bool:
        return lease not in await asyncio.to_thread(leased)

    await again_until(swept, bool, 30 * stretch(), "the lease was not swept")


CONNECT = """
import ray, sys
try:
    ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
    print("in", len(ray.nodes()))
except BaseException as error:
    print("out", type(error).__name__)
"""
GREET = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
connection.settimeout(10)
greeting = connection.recv(4096)
connection.sendall(sys.argv[3].encode() + b"\\n")
rest = b""
while data := connection.recv(4096):
    rest += data
print((greeting, rest))
"""


async def test_nobody_comes_in_without_the_token(cluster: Cluster, pair: list[Replica]) -> None:
    wrong = cluster.directory / "wrong-token"
    wrong.write_text("f" * 64)
    changes = {
        "right": {},
        "wrong": {"RAY_AUTH_TOKEN_PATH": str(wrong)},
        "none": {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": ""},
    }

    async def tried(change: dict[str, str]) -> str:
        argv = [sys.executable, "-c", CONNECT, cluster.address]
        asked = await asyncio.to_thread(cluster.run, cluster.edge, argv, environment=change, timeout=120)
        return str(asked.stdout.split()[0])

    answers = dict(zip(changes, await asyncio.gather(*map(tried, changes.values())), strict=True))
    assert answers == {"right": "in", "wrong": "out", "none": "out"}
    await call(pair[0], "relay", "x = 1")
    listed = (await admin(pair[0], "?limit=1000"))["sessions"]
    (sandbox,) = [one["sandbox"] for one in listed]
    host, _, port = sandbox["node"].partition("/")[0].rpartition(":")
    node = sandbox["node"].rpartition("/")[2]
    for line in ("hello", "0" * 64 + " " + json.dumps({"op": "control", "node": node, "nonce": "0" * 32})):
        said = cluster.edge.python(GREET, host, port, line).stdout
        assert "challenge" in said and "refused" in said, said


REACH = """
import socket
def reach(host, port):
    try:
        socket.create_connection((host, port), 2).close()
        return True
    except OSError:
        return False
[target for target in {targets} if reach(*target)]
"""


async def test_a_sandbox_reaches_neither_ray_nor_the_relay(cluster: Cluster, pair: list[Replica]) -> None:
    await call(pair[0], "inside", "x = 1")
    (one,) = (await admin(pair[0], "?limit=1000"))["sessions"]
    host, _, port = one["sandbox"]["node"].partition("/")[0].rpartition(":")
    targets = [(host, int(port)), (cluster.head.address, 6379), (cluster.store.address, 6379)]
    for machine in (*cluster.workers, cluster.head):
        targets += [(machine.address, open_port) for open_port in listening(machine)]
    assert len(targets) > 6
    reachable = [target for target in targets if connects(cluster.edge, *target)]
    assert len(reachable) >= 6, "they are there for machines of the cluster"
    own = [("127.0.0.1", open_port) for open_port in listening(cluster.workers[0])]
    assert await call(pair[0], "inside", REACH.format(targets=[*targets, *own])) == "[]"


def listening(machine: Machine) -> list[int]:
    said = machine.run(["ss", "-Htln"]).stdout
    return sorted({int(line.split()[3].rpartition(":")[2]) for line in said.splitlines()})


def connects(machine: Machine, host: str, port: int) -> bool:
    try:
        machine.connection(port, 5, host).close()
    except OSError:
        return False
    return True


async def test_a_session_is_read_through_any_replica(pair: list[Replica]) -> None:
    """Its files too, over HTTP."""
    await call(pair[0], "files", "open('name', 'w').write('content')")
    path = f"/v1/sessions/retained/{session('files')}/files/name"
    for replica in pair:
        status, body = await asyncio.to_thread(lambda replica=replica: replica.get(path, headers=key("files")))
        assert (status, body) == (200, b"content")
    began = time.monotonic()
    for _ in range(10):
        for replica in pair:
            await call(replica, "files", "n = globals().get('n', 0) + 1")
    assert await call(pair[1], "files", "n") == "20"
    print(f"20 calls in turns: {time.monotonic() - began:.2f} s")


@pytest.mark.torture
@pytest.mark.timeout(1800)
async def test_900_sessions_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    names = [f"many{number}" for number in range(900)]
    directory = tmp_path_factory.mktemp("many")
    with ray_cluster(directory, workers=2, resources={"toolhost_session": 500}) as cluster:
        replica = Replica(cluster, 1, arguments=["--max-sessions", "2000"])
        replica.start()
        try:
            made = await timed(many((call(replica, name, f"x = '{name}'; x") for name in names), at_once=16))
            assert made.value == [f"'{name}'" for name in names]
            spread = sandboxes(cluster.workers)
            assert sum(spread) == 900
            listed = await timed(per_node(replica))
            assert sum(listed.value.values()) == 900
            again = await timed(many((call(replica, name, "x") for name in names), at_once=16))
            assert again.value == made.value
            print(f"900 sessions in {made.s:.0f} s, {spread}; listed in {listed.s:.2f} s; called in {again.s:.1f} s")
            await admin(replica, "/close", "POST", {"all": True})
            await until(lambda: sandboxes(cluster.workers) == [0, 0], "sandboxes are left", 300)
        finally:
            replica.kill()
