"""The backend that a node of the cluster runs its sandboxes with.

Above: `ray_node`. Below: `bubblewrap`, `docker`. Only a node's own process uses this.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from sandboxes.backends.base import Backend
from sandboxes.backends.ray_names import LocalSettings
from sandboxes.environment import Environment, load_environment
from sandboxes.owner import Owner


def root(settings: LocalSettings, owner: Owner, host: str) -> Path:
    """Where a node keeps its things. Machines may share the disk that it is on, so its address is in it."""
    return Path(settings.state_dir) / "ray" / owner.id / re.sub(r"[^A-Za-z0-9.-]", "-", host)


def create(settings: LocalSettings, owner: Owner, directory: Path) -> Backend:
    """The backend, not opened."""
    agent = None if settings.agent is None else Path(settings.agent)
    if settings.backend == "docker":
        from sandboxes.backends.docker import DockerBackend

        # By the socket alone: the stream that docker attaches has room for one who speaks, and a node always does.
        return DockerBackend(
            state_dir=directory,
            owner=owner,
            image=settings.image,
            engine_url=settings.engine_url,
            runtime=settings.runtime,
            networks=settings.networks,
            channel="socket",
            agent=agent,
            timeout_s=settings.timeout_s,
            grace_s=settings.grace_s,
            fence_s=settings.fence_s,
        )
    from sandboxes.backends.bubblewrap import BubblewrapBackend

    given = settings.environment
    return BubblewrapBackend(
        state_dir=directory,
        owner=owner,
        environment=partial(_same, given) if given else partial(load_environment, Path(settings.environment_dir)),
        agent=agent,
        timeout_s=settings.timeout_s,
        grace_s=settings.grace_s,
        fence_s=settings.fence_s,
    )


def _same(environment: Environment) -> Environment:
    return environment
