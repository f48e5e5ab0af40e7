"""Sessions over a Ray cluster beside the same on one machine: what the lease and the relay cost."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.samples import Samples
from benchmarks.tables import Table
from tests.sandboxes.backends import ray_host
from tests.support.cluster import no_cluster, ray_cluster

LOCAL = "bubblewrap, on this machine"
CLUSTER = "bubblewrap, on a node of a cluster"
MEASURE_S = 600.0


async def run(bench: Bench) -> list[Table]:
    if (reason := no_cluster()) is not None:
        return [_table("cluster-start", {}, reason), _table("cluster-call", {}, reason)]
    found = await asyncio.to_thread(_measured, bench.pick(30, 50), bench.pick(1000, 4000))
    return [_table("cluster-start", found["start"]), _table("cluster-call", found["call"])]


def _measured(launches: int, calls: int) -> dict[str, dict[str, list[float]]]:
    with tempfile.TemporaryDirectory(prefix="toolhost-bench-") as directory:
        Path(directory).chmod(0o755)
        with ray_cluster(Path(directory), workers=2, resources={"CPU": 2, ray_host.RESOURCE: 20}) as cluster:
            place = str(ray_host.prepare(cluster))
            argv = ["-m", "benchmarks.cluster_measure", place, str(launches), str(calls)]
            said = ray_host.run_on_edge(cluster, argv, timeout=MEASURE_S).stdout
    measured: dict[str, dict[str, list[float]]] = json.loads(said.splitlines()[-1])
    return measured


def _table(name: str, found: dict[str, list[float]], left_out: str = "") -> Table:
    titles = {
        "cluster-start": "New session on a cluster, to its first result",
        "cluster-call": "Call through a cluster's relay",
    }
    note = "By the backends alone, no MCP. Two workers and an edge in namespaces of their own on this machine."
    rows = {LOCAL: Samples(found["local"]), CLUSTER: Samples(found["cluster"])} if found else {}
    return Table(name, titles[name], "s", LOCAL, rows, note, {CLUSTER: left_out} if left_out else {})
