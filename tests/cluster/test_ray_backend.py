"""The cluster backend on two workers and an edge, without tool hosts: the contract suite, races, and leases."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.cluster.driving import UNUSED_S, Driver, replica, within
from tests.sandboxes.backends import ray_host
from tests.support.cluster import Cluster, ray_cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

# The suites of execution, endurance and attacks pass there, too, and take minutes: they run on the nodes' own backends.
SUITES = ["tests/contract/test_backends.py", "tests/contract/test_cases.py"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    resources = {"CPU": 2, ray_host.RESOURCE: 30}
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
    within(30, lambda: driver.call("leases") == [], "leases go with their sandboxes")


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
    assert driver.call("leases") == ["left"]
    within(90, lambda: driver.call("leases") == [], "the lease is swept")


def test_a_drained_node_is_passed_over_by_replicas_that_have_not_heard(cluster: Cluster, driver: Driver) -> None:
    kept = driver.call("launch", key="kept")
    node = kept["node"].partition(":")[0]
    with replica(cluster) as other:
        driver.call("drain", node=node, draining=True)
        handles = other.call("launch_all", keys=[f"new-{number}" for number in range(6)])
        assert not any(handle["node"] == kept["node"] for handle in handles)
        assert other.call("launch", key="kept") == kept
        driver.call("drain", node=node, draining=False)
        time.sleep(3)  # the other one hears of it
        handles = other.call("launch_all", keys=[f"again-{number}" for number in range(8)])
        assert any(handle["node"] == kept["node"] for handle in handles)


def test_a_tool_host_with_other_settings_renews_the_node_hosts_and_keeps_their_sandboxes(
    cluster: Cluster, driver: Driver
) -> None:
    handles = driver.call("launch_all", keys=[f"kept-{number}" for number in range(4)])
    before = node_hosts(cluster)
    with replica(cluster, UNUSED_S + 1) as other:
        assert not before & node_hosts(cluster)
        for host in (driver, other):
            for handle in handles:
                assert host.call("connect", handle=handle) == handle["sandbox_id"]


def node_hosts(cluster: Cluster) -> set[int]:
    return {
        process.pid
        for worker in cluster.workers
        for process in worker.processes()
        if "ray::NodeHost" in process.command
    }


@pytest.mark.parametrize("suite", SUITES)
def test_it_keeps_the_contract(cluster: Cluster, driver: Driver, suite: str) -> None:
    """Suites of every backend, unchanged, in a process on the edge."""
    base = cluster.directory / "base"
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(base), "-o", "addopts=--strict-markers"]
    ran = ray_host.run_on_edge(cluster, ["-m", "pytest", suite, "-k", "[ray", *options], check=False, timeout=800)
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert " passed" in ran.stdout and " skipped" not in ran.stdout, ran.stdout[-500:]
