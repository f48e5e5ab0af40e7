"""The cluster backend on two workers and an edge: what is placed where, who wins a race, and what is out of reach."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.driving import Driver, Failed, replica, within
from tests.sandboxes.backends import ray_host
from tests.support.cluster import Cluster, ray_cluster
from tests.support.machines import Machine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

CAPACITY = 50  # of each worker


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    resources = {"CPU": 2, ray_host.RESOURCE: CAPACITY}
    with ray_cluster(tmp_path_factory.mktemp("cluster"), workers=2, resources=resources) as made:
        yield made


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Iterator[Driver]:
    with replica(cluster) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(driver: Driver) -> Iterator[None]:
    yield
    driver.call("destroy_all")


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    return str(tmp_path / "ledger.db")


def machine_of(cluster: Cluster, handle: dict[str, str]) -> Machine:
    return next(worker for worker in cluster.workers if handle["node"].startswith(f"{worker.address}:"))


def node_host(machine: Machine) -> int:
    [found] = [process.pid for process in machine.processes() if "ray::NodeHost" in process.command]
    return found


def test_sessions_are_spread_and_one_too_many_is_told_at_capacity(driver: Driver) -> None:
    handles = driver.call("launch_all", keys=[f"s-{number}" for number in range(2 * CAPACITY)])
    assert [one for one in handles if isinstance(one, str)] == []
    counts = Counter(handle["node"] for handle in handles)
    assert len(counts) == 2 and all(0.4 <= count / len(handles) <= 0.6 for count in counts.values()), counts
    with pytest.raises(Failed, match="at capacity") as failed:
        driver.call("launch", key="one-more")
    assert failed.value.kind == "NoCapacity"
    driver.call("destroy", handle=handles[0])
    assert driver.call("launch", key="one-more")["key"] == "one-more"


def test_two_replicas_that_race_for_the_same_keys_get_the_same_instances(cluster: Cluster, driver: Driver) -> None:
    keys = [f"race-{number}" for number in range(20)]
    with replica(cluster) as other:
        first, second = driver.begin("launch_all", keys=keys), other.begin("launch_all", keys=keys)
        assert first.result(100) == second.result(100)
        assert len({handle["instance"] for handle in first.result()}) == 20
        assert len(driver.call("owned")) == 20
        handle = first.result()[0]
        assert other.call("connect", handle=handle) == handle["sandbox_id"] == driver.call("connect", handle=handle)


def test_a_lease_whose_replica_died_before_its_launch_is_swept(cluster: Cluster, driver: Driver) -> None:
    doomed = Driver(cluster)
    assert doomed.call("lease", key="left")
    doomed.kill()
    assert driver.call("find", key="left")
    within(60, lambda: driver.call("find", key="left") is None, "the lease is swept")


def test_leases_go_with_their_sessions(driver: Driver) -> None:
    handle = driver.call("launch", key="short")
    assert driver.call("find", key="short")
    driver.call("destroy", handle=handle)
    within(20, lambda: driver.call("find", key="short") is None, "the lease is given back")


def test_a_drained_node_keeps_its_sessions_and_gets_no_new_ones(cluster: Cluster, driver: Driver) -> None:
    kept = driver.call("launch", key="kept")
    drained = machine_of(cluster, kept)
    driver.call("drain", node=drained.address, draining=True)
    handles = driver.call("launch_all", keys=[f"new-{number}" for number in range(10)])
    assert not any(handle["node"] == kept["node"] for handle in handles)
    assert driver.call("launch", key="kept") == kept
    assert driver.call("connect", handle=kept) == kept["sandbox_id"]
    driver.call("drain", node=drained.address, draining=False)
    handles = driver.call("launch_all", keys=[f"again-{number}" for number in range(10)])
    assert any(handle["node"] == kept["node"] for handle in handles)


def test_a_killed_node_host_comes_back_with_its_sandboxes(cluster: Cluster, driver: Driver, ledger: str) -> None:
    with replica(cluster, ledger) as host:
        host.run("a", "x = 42")
        worker = machine_of(cluster, host.call("handle_of", session="a"))
        running = host.begin("run", session="a", code="import time\ntime.sleep(3)\nx")
        within(20, lambda: running.running() or True, "it runs")
        os.kill(node_host(worker), signal.SIGKILL)
        answered = running.result(60)
        assert (answered["text"], answered["epoch"], answered["lost"]) == ("42", 1, None)
        os.kill(node_host(worker), signal.SIGKILL)
        answered = host.run("a", "x + 1")
        assert (answered["text"], answered["epoch"], answered["lost"]) == ("43", 1, None)
        assert answered["took_s"] < 10  # 0.5 s when nothing else runs here


def test_a_sandbox_reaches_neither_ray_nor_the_relay(cluster: Cluster, driver: Driver, ledger: str) -> None:
    with replica(cluster, ledger) as host:
        host.run("a", "import socket")
        relay, port = host.call("handle_of", session="a")["node"].partition("/")[0].split(":")
        head, head_port = cluster.address.split(":")
        for address in ((relay, int(port)), (head, int(head_port)), ("127.0.0.1", int(port)), (relay, 22)):
            said = host.run("a", f"socket.create_connection({address!r}, timeout=2)")
            assert said["ending"] == "raised", said
            assert "unreachable" in said["text"] or "refused" in said["text"], said


WRONG = """
import sys, ray
try:
    ray.init(sys.argv[1], log_to_driver=False)
except BaseException as error:
    print("refused:", type(error).__name__, str(error)[:300])
else:
    print("let in")
"""


@pytest.mark.parametrize("token", ["", "0" * 64])
def test_ray_lets_nobody_in_without_the_token(cluster: Cluster, tmp_path: Path, token: str) -> None:
    path = cluster.directory / f"token-{len(token)}"
    path.write_text(token)
    environment = {"RAY_AUTH_TOKEN_PATH": str(path)} if token else {"RAY_AUTH_MODE": "disabled"}
    environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"
    argv = ["timeout", "40", sys.executable, "-c", WRONG, cluster.address]
    said = cluster.run(cluster.edge, argv, environment=environment, check=False)
    assert "let in" not in said.stdout, said
