"""The contract suite of backends, unchanged, with the cluster backend: it runs on the edge, over two workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandboxes.backends import ray_host
from tests.support.cluster import ray_cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SUITE = "tests/contract/test_backends.py"


def test_the_cluster_backend_keeps_the_contract(tmp_path: Path) -> None:
    with ray_cluster(tmp_path, workers=2, resources={"CPU": 2, ray_host.RESOURCE: 30}) as cluster:
        base = cluster.directory / "base"
        options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(base), "-o", "addopts=--strict-markers"]
        ran = ray_host.run_on_edge(cluster, ["-m", "pytest", SUITE, "-k", "[ray", *options], check=False, timeout=800)
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert " passed" in ran.stdout and " skipped" not in ran.stdout, ran.stdout[-500:]
