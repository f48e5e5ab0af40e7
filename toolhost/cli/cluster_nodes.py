"""The nodes of a cluster as a tool host sees them, for `toolhost cluster status` and `drain`.

Above: `cli.cluster`. Below: the backend `ray`, opened for a moment from a machine of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from sandboxes.backends.ray import RayBackend
from sandboxes.backends.ray_names import NodeInfo
from sandboxes.backends.ray_versions import versions
from sandboxes.errors import BackendError
from toolhost.backends import create_backend, owner_of
from toolhost.config import Settings
from toolhost.errors import ConfigurationError

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class View:
    """The cluster at one moment. `versions`: of this machine, which the nodes' are compared with."""

    head: str
    nodes: Sequence[NodeInfo]
    versions: Mapping[str, str]

    @property
    def sessions(self) -> int:
        return sum(node.sandboxes for node in self.nodes)

    @property
    def capacity(self) -> int:
        """Sessions that may run, drained nodes' places not counted."""
        return sum(node.capacity for node in self.nodes if node.alive and not node.draining)

    def wrong(self) -> list[str]:
        """What an operator has to mend, a line each."""
        found = [f"node {node.host}: {node.problem}" for node in self.nodes if node.problem]
        for node in self.nodes:
            for name, other in self.differing(node).items():
                found.append(
                    f"node {node.host} has {name} {other}, this machine {self.versions[name]}: "
                    "install the same on every machine"
                )
        if not self.nodes:
            found.append("no machine takes sessions: toolhost cluster up --address HEAD:PORT --sessions N on some")
        return found

    def differing(self, node: NodeInfo) -> dict[str, str]:
        """A node's versions that are not this machine's."""
        return {
            name: other
            for name, other in node.versions.items()
            if other and self.versions.get(name) and other != self.versions[name]
        }


async def look(settings: Settings, head: str) -> View:
    """Raises BackendError, ConfigurationError."""
    async with _opened(settings) as backend:
        return View(head, backend.nodes(), versions())


async def drain(settings: Settings, node: str, *, draining: bool) -> NodeInfo:
    """Tells a node to take no new sessions, or to take them again. Raises BackendError, ConfigurationError."""
    async with _opened(settings) as backend:
        await backend.drain(node, draining=draining)
        return _named(backend, node)


async def emptied(settings: Settings, node: str, tell: Callable[[int], None]) -> None:
    """Returns when no sandbox is on the node any more; calls `tell` with their number whenever it changes.

    Raises BackendError, ConfigurationError.
    """
    last = -1
    async with _opened(settings) as backend:
        while last != 0:
            now = _named(backend, node).sandboxes
            if now != last:
                tell(now)
            last = now
            if now:
                await asyncio.sleep(POLL_S)


def _named(backend: RayBackend, text: str) -> NodeInfo:
    """The node that was named: the backend has just found it. Raises BackendError when it is gone."""
    wanted = text.rpartition("/")[2]
    for node in backend.nodes():
        if node.host == text or node.node.rpartition("/")[2].startswith(wanted[:12]):
            return node
    raise BackendError(f"the node {text} is not there any more")


@contextlib.asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[RayBackend]:
    try:
        backend = create_backend(settings, owner_of(settings))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the cluster's owner cannot be read: {error}") from None
    assert isinstance(backend, RayBackend)
    await backend.open(launching=False)
    try:
        yield backend
    finally:
        await backend.close()
