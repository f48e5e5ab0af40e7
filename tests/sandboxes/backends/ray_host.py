"""What the tests of the cluster backend share: backends in a process on the edge of a `tests.support.cluster`.

Everything is below a directory that all machines see, by the same path. The owners are always the same, so that the
nodes' NodeHosts, which are an owner's, are made once for many tests.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sandboxes.agent
from sandboxes.backends.ray import RayBackend
from sandboxes.backends.ray_leases import Leases
from sandboxes.backends.ray_names import LocalSettings, NodeSettings, namespace
from sandboxes.owner import Owner
from tests.sandboxes.backends import bubblewrap_host
from tests.support.cluster import Cluster

RESOURCE = "toolhost_session"
DIRECTORY = "TOOLHOST_TEST_RAY_DIRECTORY"  # set for the tests that run on the edge
GRACE_S = 0.3
OWNER = Owner("00000000000000aa", b"o" * 32)
STRANGER = Owner("00000000000000bb", b"s" * 32)
SMALL = bubblewrap_host.SMALL


def prepare(cluster: Cluster) -> Path:
    """The directory for a cluster's hosts: owner files, and the agent's programs where every uid can read them."""
    directory = cluster.directory / "hosts"
    directory.mkdir(mode=0o755, exist_ok=True)
    if not (directory / "agent").exists():
        shutil.copytree(sandboxes.agent.__path__[0], directory / "agent")
    for owner in (OWNER, STRANGER):
        path = directory / f"owner-{owner.id}"
        path.write_text(f"{owner.id} {owner.secret.hex()}\n")
        path.chmod(0o600)
    return directory


def run_on_edge(cluster: Cluster, argv: Sequence[str], **options: Any) -> Any:
    """A Python program of the tests on the edge, with the cluster's directory in its environment."""
    environment = {DIRECTORY: str(prepare(cluster)), "PYTHONPATH": os.pathsep.join(sys.path)}
    return cluster.run(cluster.edge, [sys.executable, *argv], environment=environment, **options)


@dataclass
class Host:
    """On the edge: backends of one directory. `shared`: they use one bridge to Ray, as its start takes seconds."""

    directory: Path
    share: bool = False

    def __post_init__(self) -> None:
        self._bridges: dict[str, SharedLeases] = {}

    def settings(self, owner: Owner, **options: Any) -> NodeSettings:
        local = LocalSettings(
            state_dir=str(self.directory / "state"),
            environment=bubblewrap_host.environment(),
            agent=str(self.directory / "agent"),
            grace_s=GRACE_S,
            fence_s=8.0,
        )
        return NodeSettings(owner_file=str(self.directory / f"owner-{owner.id}"), local=local, **options)

    def backend(self, owner: Owner = OWNER, **options: Any) -> RayBackend:
        settings = self.settings(owner, **options)
        if not self.share:
            return RayBackend(owner=owner, node=settings)
        if owner.id not in self._bridges:
            self._bridges[owner.id] = SharedLeases(
                address="auto", namespace=namespace(owner), owner_id=owner.id, settings=settings, environment={}
            )
        return RayBackend(owner=owner, node=settings, leases=self._bridges[owner.id])

    def leftovers(self) -> list[str]:
        """What is still there of any sandbox, on any node."""
        found: list[str] = []
        for owner in (OWNER, STRANGER):
            for node in (self.directory / "state" / "ray" / owner.id).glob("*/bubblewrap"):
                places = [node / name for name in ("sandboxes", "workspaces", "trash", "locks")]
                found += [str(path) for place in places for path in place.iterdir()]
        return sorted(found)

    async def close(self) -> None:
        for bridge in self._bridges.values():
            await bridge.end()
        self._bridges.clear()

    @property
    def owners(self) -> list[Owner]:
        """Whose backends have been opened."""
        return [owner for owner in (OWNER, STRANGER) if owner.id in self._bridges]


class SharedLeases(Leases):
    """Opened once, and closed by `end`."""

    _open = False

    async def open(self) -> None:
        if not self._open:
            await super().open()
            self._open = True

    async def close(self) -> None:
        pass

    async def end(self) -> None:
        await super().close()
