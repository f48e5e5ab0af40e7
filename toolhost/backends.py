"""From settings to a backend and to what sessions may do: the part of the composition root that `doctor` shares.

Above: `services`, `doctor`. Below: `config`, sandboxes' public API. Engines' libraries are imported only when used.
"""

from __future__ import annotations

import contextlib
import json
import os
from contextlib import closing
from functools import partial

from sandboxes.backends.base import Backend
from sandboxes.owner import Owner
from sandboxes.settings import ManagerSettings
from sandboxes.spec import Limits, SandboxSpec
from sandboxes.stores.base import Store
from sandboxes.stores.registry import store_class
from toolhost.config import Settings
from toolhost.errors import ConfigurationError

# Idle sandboxes take little of their limit; with all of them at it at once, this share of the memory must hold them.
MEMORY_SHARE = 0.75
DEFAULT_ENGINE = "unix:///var/run/docker.sock"
ENGINE_ANSWER_S = 5
FEWEST_SESSIONS = 4
CLUSTER_SESSIONS = 100_000


def create_backend(settings: Settings, owner: Owner) -> Backend:
    """The backend that the settings name; `auto` is docker when an engine answers and has the image, else bubblewrap.

    With `auto` it asks the engine, and blocks for up to ENGINE_ANSWER_S.
    """
    choice = settings.sandbox.backend
    if choice == "ray":
        return _ray(settings, owner)
    if choice == "docker" or (choice == "auto" and engine_is_ready(settings)):
        return _docker(settings, owner)
    return _bubblewrap(settings, owner)


def create_store(settings: Settings, owner: Owner) -> Store:
    """Where sessions are kept. In Redis each owner has its own, which are all hosts of a cluster, or one host.

    Raises ConfigurationError.
    """
    if not settings.store.redis:
        return store_class("sqlite")(settings.state_dir / "ledger.sqlite")  # type: ignore[call-arg]
    url = _store_url(settings)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigurationError("store.url must begin with redis://, rediss:// or unix://")
    try:
        found = store_class("redis")
    except ImportError:
        raise ConfigurationError("a store in Redis needs a package: pip install 'toolhost[redis]'") from None
    return found(url, f"{settings.store.prefix}{owner.id}:")  # type: ignore[call-arg]


def _store_url(settings: Settings) -> str:
    given, file = settings.store.url, settings.store.url_file
    if given is not None:
        return given.get_secret_value().strip()
    assert file is not None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read store.url_file {file}: {error}") from None


def engine_is_ready(settings: Settings) -> bool:
    """Whether a Docker engine answers soon and has the sandbox image."""
    import docker
    from docker.errors import DockerException
    from requests import RequestException

    try:
        with closing(docker.DockerClient(base_url=engine_url(settings), timeout=ENGINE_ANSWER_S)) as client:
            client.images.get(image(settings))
    except (DockerException, RequestException, ValueError):
        return False
    return True


def engine_url(settings: Settings) -> str:
    """The engine's address."""
    return settings.docker.host or DEFAULT_ENGINE


def image(settings: Settings) -> str:
    """The sandbox image's name."""
    from sandboxes.environment.image import DEFAULT_TAG

    return settings.docker.image or DEFAULT_TAG


def _bubblewrap(settings: Settings, owner: Owner) -> Backend:
    from sandboxes.backends.bubblewrap import BubblewrapBackend
    from sandboxes.environment import load_environment

    return BubblewrapBackend(
        state_dir=settings.state_dir,
        owner=owner,
        environment=partial(load_environment, settings.environment_dir),
        timeout_s=settings.python.timeout_s,
        fence_s=settings.lifecycle.fence_s,
    )


def _docker(settings: Settings, owner: Owner) -> Backend:
    from sandboxes.backends.docker import DockerBackend

    return DockerBackend(
        state_dir=settings.state_dir,
        owner=owner,
        image=image(settings),
        engine_url=engine_url(settings),
        runtime=settings.docker.runtime,
        networks=frozenset(settings.docker.networks),
        channel=settings.docker.channel,
        timeout_s=settings.python.timeout_s,
        fence_s=settings.lifecycle.fence_s,
    )


def owner_of(settings: Settings) -> Owner:
    """Whose sandboxes this host's are: its own, or with `ray` the cluster's, which all its hosts have in a file.

    Made on first use in a state directory. Raises OSError, ValueError.
    """
    given = settings.ray.owner_file
    if settings.sandbox.backend == "ray" and given is not None:
        from sandboxes.backends.ray_names import read_owner

        return read_owner(given)
    return Owner.load(settings.state_dir)


def ray_environment(settings: Settings) -> dict[str, str]:
    """Variables for processes of this host that speak with Ray: its token, where there is one."""
    token = settings.ray.token_file or settings.state_dir / "cluster" / "token"
    if settings.ray.token_file is None and not token.exists():
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def ray_address(settings: Settings) -> str:
    """Of the head: as set, or of the cluster that `toolhost cluster up` has joined with this state directory, or
    "auto", which is what Ray itself finds on this machine."""
    if settings.ray.address == "auto":
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((settings.state_dir / "cluster" / "node.json").read_text())["address"])
    return settings.ray.address


def _ray(settings: Settings, owner: Owner) -> Backend:
    from sandboxes.backends.ray import RayBackend
    from sandboxes.backends.ray_names import LocalSettings, NodeSettings

    ray = settings.ray
    return RayBackend(
        owner=owner,
        address=ray_address(settings),
        environment=ray_environment(settings),
        node=NodeSettings(
            owner_file=str((ray.owner_file or settings.state_dir / "owner").absolute()),
            bind=ray.relay_host,
            port=ray.relay_port,
            unused_s=ray.unused_s,
            patience_s=ray.head_patience_s,
            abandoned_s=settings.lifecycle.fence_s,
            local=LocalSettings(
                backend=ray.local,
                state_dir=str((ray.node_state_dir or settings.state_dir).absolute()),
                environment_dir=str(settings.environment_dir.absolute()),
                image=image(settings),
                engine_url=engine_url(settings),
                runtime=settings.docker.runtime,
                networks=frozenset(settings.docker.networks),
                timeout_s=settings.python.timeout_s,
                fence_s=ray.fence_s,
            ),
        ),
    )


def manager_settings(settings: Settings) -> ManagerSettings:
    """What the session manager is told."""
    lifecycle, sandbox = settings.lifecycle, settings.sandbox
    # In a cluster the nodes' own capacities decide, and the head says when there is none left.
    fitting = CLUSTER_SESSIONS if sandbox.backend == "ray" else sessions_that_fit(sandbox.memory_bytes)
    most = lifecycle.max_sessions or fitting
    return ManagerSettings(
        spec=SandboxSpec(
            limits=Limits(
                memory_bytes=sandbox.memory_bytes,
                cpus=sandbox.cpus,
                processes=sandbox.processes,
                disk_bytes=sandbox.disk_bytes,
                tmp_bytes=sandbox.tmp_bytes,
                shm_bytes=sandbox.shm_bytes,
                open_files=sandbox.open_files,
            ),
            egress=sandbox.egress,
            preimports=settings.python.preimports,
            environment=dict(sandbox.environment),
        ),
        timeout_s=settings.python.timeout_s,
        max_timeout_s=max(settings.python.max_timeout_s, settings.python.timeout_s),
        max_characters=settings.python.max_characters,
        idle_s=lifecycle.idle_s,
        max_idle_s=lifecycle.max_ttl_s,
        lifetime_s=lifecycle.lifetime_s,
        grace_s=lifecycle.grace_s,
        max_sessions=most,
        max_sessions_per_principal=lifecycle.max_sessions_per_principal or most,
        max_waiting=lifecycle.max_queue,
        queue_s=lifecycle.queue_s,
        pool_size=lifecycle.pool,
        shutdown_s=max(1.0, settings.server.shutdown_s / 2 - 1),  # it takes this long twice: calls, then sandboxes
        keep_on_shutdown=lifecycle.on_stop == "keep",
    )


def sessions_that_fit(memory_bytes: int) -> int:
    """How many sandboxes of that limit this machine's memory holds."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(FEWEST_SESSIONS, int(total * MEMORY_SHARE / memory_bytes))
