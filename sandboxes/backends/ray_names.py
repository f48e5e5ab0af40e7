"""Names and data that the parts of the cluster backend share: what Ray calls things, where a node is, its settings.

Above: every other `ray_*` module. Below: nothing of Ray.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from sandboxes.backends.ray_versions import versions
from sandboxes.environment import Environment
from sandboxes.owner import Owner
from sandboxes.spec import Handle

NAME = "ray"
# The custom resource of Ray's nodes: how many sessions a node takes. A node without it takes none.
RESOURCE = "toolhost_session"
# A label that Ray gives every node by itself.
NODE_LABEL = "ray.io/node-id"
STARTING = "it is starting"  # why a node does not take sessions yet
SHORT = 12  # so much of a node's id is in handles


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node's relay is, and which life of the node it belongs to. As text: `HOST:PORT/ID`."""

    host: str
    port: int
    node: str  # the first 12 hex digits of Ray's node id, which a node that starts again does not keep

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.node}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises ValueError."""
        address, _, node = text.rpartition("/")
        host, _, port = address.rpartition(":")
        if not node or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"not HOST:PORT/ID: {text[:80]!r}")
        return cls(host.removeprefix("[").removesuffix("]"), int(port), node)


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """What a node makes its own backend of. Paths are those of the node. Plain data: it travels through Ray.

    `environment`: what bubblewrap's user code runs in; None: what `toolhost setup` made in `environment_dir`.
    `fence_s`: a sandbox that its NodeHost has left for so long ends itself. Other times: see the backends.
    """

    backend: Literal["bubblewrap", "docker"] = "bubblewrap"
    state_dir: str = ""
    environment_dir: str = ""
    environment: Environment | None = None
    agent: str | None = None
    image: str = "toolhost-python:latest"
    engine_url: str = "unix:///var/run/docker.sock"
    runtime: str | None = None
    networks: frozenset[str] = frozenset()
    timeout_s: float = 120.0
    grace_s: float = 2.0
    fence_s: float = 5.0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a NodeHost is told. No secret is in it: Ray keeps it where every process of the cluster can read it.

    `owner_file`: where the owner's id and secret are, on every node. `bind`: the relay's address; "" is the one that
    Ray knows the node by. `port`: 0 takes a free one, and keeps it. Times are seconds. `unused_s`: a lease in which
    nothing was launched is given back after so long. `patience_s`: without the head for so long, a node ends its
    sandboxes. `abandoned_s`: so does one that no tool host has connected to.
    """

    owner_file: str
    local: LocalSettings = field(default_factory=LocalSettings)
    bind: str = ""
    port: int = 0
    sweep_s: float = 2.0
    unused_s: float = 60.0
    patience_s: float = 300.0
    abandoned_s: float = 24 * 3600.0


def digest(settings: NodeSettings) -> str:
    """Tells settings apart, and the versions of toolhost that they are for."""
    said = json.dumps([plain(asdict(settings)), versions()["toolhost"]], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """With what JSON has not, as what it has."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, frozenset):
        return sorted(plain(inner) for inner in value)
    if isinstance(value, tuple | list):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, PurePath) else value


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node of the cluster, for the operators' list. `problem`: why it takes no sessions, "" when it does."""

    node: str  # HOST:PORT/ID, or HOST/ID before its relay is known
    host: str
    alive: bool
    draining: bool = False
    capacity: int = 0
    sandboxes: int = 0
    problem: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # of Python, Ray and toolhost; empty when not known


def namespace(owner: Owner) -> str:
    """Ray's namespace of everything of one owner."""
    return f"toolhost-{owner.id}"


def lease_name(owner_id: str, workspace: str) -> str:
    """The name of the placement group that is a session's lease: its place is where the session's files are."""
    return f"toolhost/{owner_id}/{workspace}"


def workspace_of(owner_id: str, lease: str) -> str | None:
    """The inverse of `lease_name`; None for what is not this owner's."""
    prefix = f"toolhost/{owner_id}/"
    return lease[len(prefix) :] if lease.startswith(prefix) else None


def actor_name(node_id: str) -> str:
    return f"toolhost-node-{node_id}"


def read_owner(path: Path) -> Owner:
    """The owner that a file of `Owner.load`'s format names. Raises OSError, ValueError."""
    ident, secret = path.read_text().split()
    return Owner(ident, bytes.fromhex(secret))


def stored(handle: Handle) -> dict[str, object]:
    """A handle as JSON has it."""
    return {name: getattr(handle, name) for name in Handle.__slots__}


def loaded(fields: object) -> Handle:
    """The inverse of `stored`. Raises ValueError."""
    if not isinstance(fields, dict) or set(fields) != set(Handle.__slots__):
        raise ValueError("not a handle")
    texts = {name: value for name, value in fields.items() if name != "created_at"}
    created = fields["created_at"]
    if not all(isinstance(value, str) and len(value) <= 512 for value in texts.values()):
        raise ValueError("not a handle")
    if isinstance(created, bool) or not isinstance(created, int | float):
        raise ValueError("not a handle")
    return Handle(**texts, created_at=float(created))
