"""The composition root: everything that the host is made of, built from settings, ended in reverse.

Above: `app`, commands. Below: all rooms. Nothing else here constructs a backend, a store or a manager.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry

from sandboxes import locks
from sandboxes.backends.base import Backend
from sandboxes.lifecycle import LIVE
from sandboxes.manager import SessionManager
from sandboxes.owner import Owner
from sandboxes.spec import SessionKey, SessionRequest
from toolhost import auth as authentication
from toolhost.admin import AllSessions
from toolhost.backends import create_backend, create_store, manager_settings, owner_of
from toolhost.browsing.service import search_options
from toolhost.config import Settings
from toolhost.errors import ConfigurationError
from toolhost.metrics import Metrics
from toolhost.namespaces import registry
from toolhost.namespaces.base import Namespace, Opened, SessionAttachment
from toolhost.observers import Observers
from toolhost.search.auto import without_client
from toolhost.telemetry import LogObserver
from toolhost.tracing import Traces, traces

if TYPE_CHECKING:
    from toolhost.gateway.service import Gateway

log = logging.getLogger("toolhost.services")


class StateDirectoryTaken(ConfigurationError):
    """Another host holds the state directory."""


class Sessions(AllSessions, Protocol):
    """What the host needs of `sandboxes.manager.SessionManager`."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def attach(self, request: SessionRequest) -> SessionAttachment: ...

    async def resource_parts(self, key: SessionKey, name: str) -> Mapping[str, bytes]: ...

    async def health(self) -> None: ...


@dataclass
class Services:
    """The parts of one host. `open` starts what runs, `close` ends it; both may be called again."""

    settings: Settings
    sessions: Sessions
    namespaces: Mapping[str, Namespace]
    auth: authentication.Authenticator
    metrics: Metrics
    backend: Backend | None = None  # the sessions' own, to tell people about; None when they have none
    counts: Callable[[], Mapping[str, int]] | None = None  # of sessions by phase, where the manager counts them
    gateway: Gateway | None = None  # /v1/responses in this process
    traces: Traces | None = None  # where the settings ask for them
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _opened: bool = False

    async def open(self) -> None:
        """Raises SandboxError when nothing isolates, the environment is missing, or the ledger cannot be used;
        ConfigurationError when another host has this state directory."""
        if self._opened:
            return
        if self.backend is not None:
            self._stack.enter_context(only_host(self.settings.state_dir))
        try:
            for namespace in self.namespaces.values():
                if isinstance(namespace, Opened):
                    self._stack.push_async_callback(namespace.close)
                    await namespace.open()
            await self.sessions.open()
            self._stack.push_async_callback(self.sessions.close)
            if self.gateway is not None:
                self._stack.push_async_callback(self.gateway.close)
                await self.gateway.open()
        except BaseException:
            await self._stack.aclose()
            raise
        self._opened = True

    def notices(self) -> list[str]:
        """Lines for people at the start: how sandboxes are isolated, who may connect, what is missing. After `open`."""
        lines = [] if self.backend is None else [isolation(self.backend)]
        if self.auth.open and not self.settings.server.loopback:
            lines.append("WARNING: no tokens (--insecure): whoever reaches this port runs code in your sandboxes.")
        if "browser" in self.namespaces:
            lines += [
                f"WARNING: search by {name} is configured, and its client is missing: pip install 'toolhost[{name}]'."
                for name in without_client(search_options(self.settings))
            ]
        return lines

    def kept(self) -> int:
        """Sandboxes that stay when this host has stopped. After `close`."""
        counts = self.counts() if self.counts is not None else {}
        return sum(counts.get(phase.value, 0) for phase in LIVE)

    async def close(self) -> None:
        """Stops admitting calls, ends those that run within a bound, and leaves what the settings say."""
        await self._stack.aclose()


def build(settings: Settings, sessions: Sessions | None = None) -> Services:
    """Raises ConfigurationError. `sessions`: another session manager than the one that the settings describe."""
    auth = authentication.Authenticator(settings)  # before anything else: an open bind must not start at all
    namespaces = registry.create(settings)
    metrics, traced = Metrics(), traces(settings)
    if sessions is not None:
        return Services(settings, sessions, namespaces, auth, metrics, traces=traced)
    owner = _owner(settings)
    backend = create_backend(settings, owner)
    manager = SessionManager(
        backend=backend,
        store=create_store(settings, owner),
        owner=owner,
        settings=manager_settings(settings),
        observer=Observers(LogObserver(), metrics, *([] if traced is None else [traced])),
    )

    def counts() -> Mapping[str, int]:
        return manager.counts

    metrics.watch(counts)
    gateway = _gateway(settings, namespaces, manager, metrics.registry) if settings.gateway.enabled else None
    return Services(settings, manager, namespaces, auth, metrics, backend, counts, gateway, traced)


def _gateway(
    settings: Settings, namespaces: Mapping[str, Namespace], sessions: SessionManager, registry: CollectorRegistry
) -> Gateway:
    """The Responses gateway over this host's own namespaces. Its packages are an extra, loaded when it is wanted."""
    try:
        from toolhost.gateway.assembly import assemble
        from toolhost.gateway.counts import Counts
        from toolhost.tool_factory import OwnCitations, OwnFiles, ToolFactory
    except ImportError as error:
        raise ConfigurationError("--gateway needs more packages: pip install 'toolhost[gateway]'") from error
    factory = ToolFactory(namespaces, sessions.attach, settings)
    files, citations = OwnFiles(sessions.files, settings), OwnCitations(sessions.resource_parts)
    return assemble(settings.gateway, settings.state_dir, factory, files, citations, Counts(registry))


@contextmanager
def only_host(state_dir: Path) -> Iterator[None]:
    """Holds a state directory. Two hosts on one would each take the other's sandboxes for orphans.

    The lock goes with the process, however it ends. Raises StateDirectoryTaken, ConfigurationError.
    """
    try:
        lock = locks.take(state_dir / "lock", 0o600)
    except locks.Held:
        raise StateDirectoryTaken(
            f"another host runs on the state directory {state_dir}; stop it, or give this one another --state-dir"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"state directory {state_dir} cannot be used: {error}") from None
    try:
        yield
    finally:
        lock.release()


def isolation(backend: Backend) -> str:
    """One honest line on what keeps sandboxes apart. `backend` is open."""
    missing = sorted(backend.differences)
    line = f"Isolation: {backend.name}"
    return f"{line}; not given here: {', '.join(missing)} (docs/isolation.md)" if missing else line


def _owner(settings: Settings) -> Owner:
    try:
        return owner_of(settings)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"state directory {settings.state_dir} cannot be used: {error}") from None
