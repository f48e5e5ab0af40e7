"""A host as its users have it, on each backend, and the proof that nothing of it is left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import docker
import psutil
import pytest

from sandboxes.backends.docker_container import owner_filter
from sandboxes.owner import Owner
from tests.support.host import RunningHost

LEFT_S = 30.0


def sandboxes(host: RunningHost) -> list[str]:
    """The running sandboxes of a host, as the system knows them: not by asking the host."""
    return containers(host) if host.backend == "docker" else process_trees(host)


def process_trees(host: RunningHost) -> list[str]:
    """By the owner files that the bubblewrap backend keeps."""
    found = []
    for file in (host.state_dir / "bubblewrap" / "sandboxes").glob("*/owner.json"):
        try:
            init = json.loads(file.read_text())["init"]
        except FileNotFoundError:
            continue
        if init is not None and psutil.pid_exists(init["pid"]):
            found.append(str(init["pid"]))
    return found


def containers(host: RunningHost) -> list[str]:
    """By the labels on the engine's containers."""
    owned = {"label": owner_filter(Owner.load(host.state_dir))}
    with closing(docker.from_env()) as engine:
        return [container.id for container in engine.containers.list(filters=owned, ignore_removed=True)]


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for what another process does; fails by name when it does not happen."""
    deadline = time.monotonic() + LEFT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningHost]:
    running = RunningHost(tmp_path / "state", backend=request.param)
    running.start()
    yield running
    running.purge()
    assert sandboxes(running) == []
