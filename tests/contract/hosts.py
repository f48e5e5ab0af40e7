"""Hosts of the contract suites, by backend: `HOSTS[name](directory)` always finds the same state again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sandboxes.backends.base import Backend
from sandboxes.owner import Owner
from sandboxes.stores.sqlite import SqliteStore
from sandboxes.testing.fake_backend import FakeBackend, FakeEngine
from sandboxes.testing.host import SuiteHost
from tests.sandboxes.backends import bubblewrap_host, docker_host

GRACE_S = docker_host.GRACE_S


def fake(directory: Path) -> SuiteHost:
    engine = FakeEngine()

    def leftovers() -> list[str]:
        return sorted([*engine.sandboxes, *engine.workspaces])

    return _host(directory, lambda owner: FakeBackend(owner, engine), leftovers)


def bubblewrap(directory: Path) -> SuiteHost:
    place = bubblewrap_host.Host(directory / "state", directory / "agent")
    if not place.state.exists():
        place = bubblewrap_host.Host.make(directory, os.geteuid())
    host = _host(place.state, lambda owner: place.backend(owner=owner, grace_s=GRACE_S), place.leftovers)
    host.spec = bubblewrap_host.SMALL
    return host


def _host(state: Path, backend: Callable[[Owner], Backend], leftovers: Callable[[], list[str]]) -> SuiteHost:
    return SuiteHost(
        backend=backend,
        store=lambda: SqliteStore(state / "ledger.db"),
        owner=Owner.load(state),
        stranger=Owner("0123456789abcdef", b"s" * 32),
        leftovers=leftovers,
        state=state,
        grace_s=GRACE_S,
    )


def docker(directory: Path) -> SuiteHost:
    return _docker(docker_host.DockerHost(directory))


def docker_attach(directory: Path) -> SuiteHost:
    return _docker(docker_host.DockerHost(directory, {"channel": "attach"}))


def docker_runsc(directory: Path) -> SuiteHost:
    return _docker(docker_host.DockerHost(directory, {"runtime": "runsc"}))


def _docker(place: docker_host.DockerHost) -> SuiteHost:
    host = _host(place.state, place.backend, place.leftovers)
    host.owner, host.stranger, host.spec = place.owner, place.stranger, docker_host.SMALL
    return host


def ray(directory: Path) -> SuiteHost:
    """On the edge of a cluster (`tests/cluster/test_ray_backend.py`); only the ledger is in `directory`."""
    from tests.sandboxes.backends import ray_host

    place = ray_host.Host(Path(os.environ[ray_host.DIRECTORY]), share=True)

    class Host(SuiteHost):
        async def clear(self) -> None:
            for owner in place.owners:  # another one has nothing
                async with self.opened(owner):
                    pass
            await place.close()

    return Host(
        backend=place.backend,
        store=lambda: SqliteStore(directory / "ledger.db"),
        owner=ray_host.OWNER,
        stranger=ray_host.STRANGER,
        leftovers=place.leftovers,
        state=place.directory / "state",
        grace_s=GRACE_S,
        spec=ray_host.SMALL,
    )


HOSTS = {
    "fake": fake,
    "bubblewrap": bubblewrap,
    "docker": docker,
    "docker-attach": docker_attach,
    "docker-runsc": docker_runsc,
    "ray": ray,
}
