"""What the tests of the docker backend share: a host on the engine of this machine, and what it left there."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker

from sandboxes.backends.docker import DockerBackend
from sandboxes.backends.docker_container import owner_filter
from sandboxes.owner import Owner
from sandboxes.spec import Limits, SandboxSpec
from tests.support.machine import IMAGE

ENGINE = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
SMALL = SandboxSpec(limits=Limits(memory_bytes=256 << 20, processes=48, tmp_bytes=32 << 20, shm_bytes=16 << 20))

GRACE_S = 1.0  # of the ladder's steps: what a busy machine's interpreter needs to take an interrupt


def engine() -> docker.APIClient:
    """A client of its own, that looks past the backend."""
    return docker.APIClient(base_url=ENGINE, version="1.41", timeout=30)


@dataclass
class DockerHost:
    """A state directory, and owners of their own: tests on one engine at the same time do not see each other."""

    state: Path
    options: dict[str, Any] = field(default_factory=dict)
    owner: Owner = field(default_factory=lambda: Owner(secrets.token_hex(8), secrets.token_bytes(32)))
    stranger: Owner = field(default_factory=lambda: Owner(secrets.token_hex(8), secrets.token_bytes(32)))

    def backend(self, owner: Owner | None = None, **options: Any) -> DockerBackend:
        chosen: dict[str, Any] = {
            "state_dir": self.state,
            "owner": owner or self.owner,
            "image": IMAGE,
            "engine_url": ENGINE,
            "grace_s": GRACE_S,
            **self.options,
            **options,
        }
        return DockerBackend(**chosen)

    def containers(self) -> list[dict[str, Any]]:
        """The containers of both owners, as the engine lists them."""
        api = engine()
        try:
            found = [
                api.containers(all=True, filters={"label": owner_filter(owner)})
                for owner in (self.owner, self.stranger)
            ]
        finally:
            api.close()
        return [container for containers in found for container in containers]

    def leftovers(self) -> list[str]:
        """Everything that belongs to a sandbox and is still there."""
        root = self.state / "docker"
        places = [root / name for name in ("channels", "workspaces", "trash")]
        left = [str(path) for place in places if place.exists() for path in place.iterdir()]
        return sorted([*left, *(container["Names"][0] for container in self.containers())])
