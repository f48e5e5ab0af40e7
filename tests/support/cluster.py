"""A Ray cluster of machines made of namespaces (`tests.support.machines`): a head, workers, an edge, and Redis.

    @pytest.fixture(scope="module")
    def cluster(tmp_path_factory) -> Iterator[Cluster]:
        with ray_cluster(tmp_path_factory.mktemp("cluster"), workers=2, resources={"CPU": 4}) as cluster:
            yield cluster

    cluster.head, cluster.workers[0], cluster.edge, cluster.store   # machines: run, popen, kill, cut, processes …
    cluster.environment        # of every Ray process: token, health checks. Given by `cluster.run`, `cluster.popen`
    cluster.address            # of the head, for `ray.init`; 10.111.0.12:6379
    cluster.redis_url          # of Redis, for a store; the head's own tables are in it too
    cluster.run(cluster.edge, [sys.executable, "-c", "import ray; ray.init('auto'); print(ray.nodes())"])
    cluster.popen(cluster.edge, [sys.executable, "-m", "toolhost", "serve", …])
    cluster.edge.forward(8000) # a port of loopback for clients in the test itself
    cluster.workers[0].kill()  # kill -9 of the node with all in it; cluster.start_node(machine) brings it back
    cluster.workers[1].cut()   # and mend(): the link
    cluster.head.kill()        # Redis goes on; cluster.start_head() brings it back
    cluster.nodes()            # as Ray sees them: {"worker1": "ALIVE", …}

Workers have the resources given (and `CPU` 1); the head and the edge have a Ray node without any, so that drivers
can run there and sessions cannot. The edge is where tool hosts run. In Ray, nodes are told apart by a label
`toolhost-machine` = the machine's name. A driver cannot be in the test's own process, which is on another machine: run
it on the edge. `cluster.directory` is seen by the test and all machines under the same path; the token is in it. A
machine's logs of Ray are below `machine.root / "tmp/ray"`.

Needs root and Ray: `no_cluster()` says why not; the mark `ray` skips with it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import Machine, Running, Site, no_machines

HEAD_PORT = 6379
REDIS_PORT = 6379
OBJECT_STORE_BYTES = 80_000_000  # Ray's least is 75 MB; sessions do not use it
START_S = 120.0
START_TURNS = 3
NODES = """
import json, ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
print(json.dumps([[node["Labels"].get("toolhost-machine", ""), node["Alive"]] for node in ray.nodes()]))
"""
# Ray's, as docs/cluster.md has them: a dead node is noticed within seconds, a head may be away for long.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}


@functools.cache
def no_cluster() -> str | None:
    """None, or why there can be no cluster of machines here."""
    if reason := no_machines():
        return reason
    if importlib.util.find_spec("ray") is None:
        return "no ray (pip install 'toolhost[ray]')"
    return None if shutil.which("redis-server") else "no redis-server (apt-get install redis-server)"


class Cluster:
    """Machines with Ray on them. `ray_cluster` starts and ends one."""

    def __init__(self, directory: Path, workers: int, resources: Mapping[str, float], tuned: bool) -> None:
        self.directory = directory
        self.resources = dict(resources)
        token = directory / "ray-token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.token_file = token
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            **(HEALTH if tuned else {}),
        }
        self.site = Site(directory)
        self.store = self.site.machine("store")
        self.head = self.site.machine("head")
        self.workers = [self.site.machine(f"worker{number + 1}") for number in range(workers)]
        self.edge = self.site.machine("edge")

    @property
    def address(self) -> str:
        return f"{self.head.address}:{HEAD_PORT}"

    @property
    def redis_url(self) -> str:
        return f"redis://{self.store.address}:{REDIS_PORT}/0"

    def start(self) -> None:
        self.start_redis()
        self.start_head()
        with ThreadPoolExecutor(len(self.workers) + 1) as at_once:
            list(at_once.map(self.start_node, [*self.workers, self.edge]))

    def start_redis(self) -> None:
        """Redis keeps all in memory: what kills the machine `store` loses it."""
        self.store.boot()
        options = ["--port", str(REDIS_PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
        self.store.popen(["redis-server", *options, "--dir", "/tmp", "--logfile", "/tmp/redis.log"], cwd="/")
        deadline = time.monotonic() + START_S
        while self.store.run(["redis-cli", "ping"], check=False).stdout.strip() != "PONG":
            assert time.monotonic() < deadline, "Redis does not answer"
            time.sleep(0.02)

    def start_head(self) -> None:
        """Starts the head, or brings a killed one back: what it knew is in Redis."""
        redis = {"RAY_REDIS_ADDRESS": f"{self.store.address}:{REDIS_PORT}"}
        self._start(self.head, ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false"], {}, redis)

    def start_node(self, machine: Machine, resources: Mapping[str, float] | None = None) -> None:
        """Starts Ray on a worker or the edge, after `kill` too; returns when it has joined."""
        if resources is None:
            resources = self.resources if machine in self.workers else {}
        self._start(machine, [f"--address={self.address}"], resources, {})

    def _start(
        self, machine: Machine, arguments: Sequence[str], resources: Mapping[str, float], environment: Mapping[str, str]
    ) -> None:
        machine.boot()
        custom = {name: amount for name, amount in resources.items() if name != "CPU"}
        cpus = resources.get("CPU", 1 if resources else 0)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *arguments),
            *(f"--node-ip-address={machine.address}", f"--num-cpus={cpus:g}", "--num-gpus=0"),
            *(f"--resources={json.dumps(custom)}", f"--labels=toolhost-machine={machine.name}"),
            *(f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-log-monitor=false", "--disable-usage-stats"),
        ]
        for turn in range(START_TURNS):
            started = self.run(machine, command, environment=environment, timeout=START_S, check=False)
            if started.returncode == 0:
                return
            # Ray gives a node 30 s to join, which nothing changes: too little where many tests run at once.
            assert "timed out during startup" in started.stderr and turn + 1 < START_TURNS, started.stderr[-3000:]
            self.run(machine, [sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"], timeout=START_S)

    def stop_node(self, machine: Machine) -> None:
        """Stops Ray on a machine in good order. What else runs on it stays."""
        self.run(machine, [sys.executable, "-m", "ray.scripts.scripts", "stop", "--grace-period=10"], timeout=START_S)

    def run(
        self, machine: Machine, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        """`machine.run` with the environment of the cluster."""
        return machine.run(argv, environment={**self.environment, **(environment or {})}, **options)

    def popen(
        self, machine: Machine, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> Running:
        """`machine.popen` with the environment of the cluster."""
        return machine.popen(argv, environment={**self.environment, **(environment or {})}, **options)

    def nodes(self) -> dict[str, str]:
        """By the machines' names, what the head says of their nodes now: ALIVE or DEAD. Asked on the edge."""
        said = self.run(self.edge, [sys.executable, "-c", NODES]).stdout.strip().splitlines()[-1]
        states: dict[str, str] = {}
        for name, alive in json.loads(said):
            if states.get(name) != "ALIVE":
                states[name] = "ALIVE" if alive else "DEAD"
        return states

    def close(self) -> None:
        self.site.close()


@contextlib.contextmanager
def ray_cluster(
    directory: Path, *, workers: int = 2, resources: Mapping[str, float] | None = None, tuned: bool = True
) -> Iterator[Cluster]:
    """A cluster that runs. `resources`: of each worker. `tuned`: False leaves Ray's own health checks.

    Nothing of it is left at the end. Skips where there can be none.
    """
    if reason := no_cluster():
        pytest.skip(reason)
    cluster = Cluster(directory, workers, resources or {"CPU": 1}, tuned)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
