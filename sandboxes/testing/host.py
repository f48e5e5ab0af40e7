"""A host for contract tests: a backend, an owner and a store that can be "restarted", also without a farewell."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from sandboxes.backends.base import Backend
from sandboxes.lifecycle import Changed
from sandboxes.manager import Attachment, SessionManager
from sandboxes.observer import NullObserver
from sandboxes.owner import Owner
from sandboxes.settings import ManagerSettings
from sandboxes.spec import KeyKind, Outcome, Retention, SandboxSpec, SessionKey, SessionRequest
from sandboxes.stores.base import Store


class Recorder(NullObserver):
    """Remembers what an observer is told."""

    def __init__(self) -> None:
        self.changes: list[tuple[SessionKey, Changed]] = []
        self.failures: list[tuple[str, BaseException]] = []
        self.starts: list[str] = []
        self.on_failure: Callable[[], None] = lambda: None

    def session_changed(self, key: SessionKey, changed: Changed) -> None:
        self.changes.append((key, changed))

    def sandbox_started(self, key: SessionKey, source: str, duration_s: float) -> None:
        self.starts.append(source)

    def failed(self, where: str, error: BaseException) -> None:
        self.failures.append((where, error))
        self.on_failure()


@dataclasses.dataclass
class SuiteHost:
    """`backend(owner)` and `store()` make new objects on the same state, as a restart does. `leftovers()` names what
    is still there of any sandbox. `grace_s` is the ladder's step that the backend's agents have."""

    backend: Callable[[Owner], Backend]
    store: Callable[[], Store]
    owner: Owner
    stranger: Owner
    leftovers: Callable[[], list[str]]
    state: Path
    grace_s: float = 0.3
    spec: SandboxSpec = dataclasses.field(default_factory=SandboxSpec)

    def make(self, recorder: Recorder | None = None, **settings: object) -> SessionManager:
        """A manager that is not open."""
        values: dict[str, object] = {"grace_step_s": self.grace_s, "spec": self.spec, **settings}
        return SessionManager(
            backend=self.backend(self.owner),
            store=self.store(),
            owner=self.owner,
            settings=ManagerSettings(**values),  # type: ignore[arg-type]  # named settings
            observer=recorder or Recorder(),
        )

    @contextlib.asynccontextmanager
    async def manager(self, recorder: Recorder | None = None, **settings: object) -> AsyncIterator[SessionManager]:
        """An open manager, stopped in the ordinary way."""
        manager = self.make(recorder, **settings)
        await manager.open()
        try:
            yield manager
        finally:
            await manager.close()

    @contextlib.asynccontextmanager
    async def opened(self, owner: Owner | None = None, *, launching: bool = True) -> AsyncIterator[Backend]:
        """A backend alone. What it has is destroyed at the end."""
        backend = self.backend(owner or self.owner)
        await backend.open(launching=launching)
        try:
            yield backend
        finally:
            for handle in await backend.list_owned():
                await backend.destroy(handle)
            await backend.close()

    async def clear(self) -> None:
        """Ends every sandbox of both owners."""
        for owner in (self.owner, self.stranger):
            async with self.opened(owner):
                pass


async def crash(manager: SessionManager) -> None:
    """What is left of a manager after `kill -9` of its process: nothing, and it said goodbye to nobody."""
    keeper = manager._keeper
    beating = manager._replica._beating if manager._replica is not None else None
    tasks = [manager._sweeping, manager._pool._task, keeper._settling, beating, *keeper._tasks]
    tasks += [run.task for session in keeper.sessions.values() for run in session.runs.values()]
    ended = [task for task in tasks if task is not None]
    manager._pool._task = manager._sweeping = None
    sandboxes = [session.sandbox for session in keeper.sessions.values() if session.sandbox is not None]
    for sandbox in sandboxes:
        sandbox.on_lost = None
        if sandbox._client is not None:
            sandbox._client._channel.writer.transport.abort()  # first: a call that ends here would send its cancel
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
    for sandbox in sandboxes:
        await sandbox.close()
    for sandbox in manager._pool._ready:
        sandbox.on_lost = None
        await sandbox.close()
    late = list(keeper._tasks)
    for task in late:
        if task.get_name() != "disconnect":  # that only frees sockets of this process; the rest would be a farewell
            task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    await manager._store.close()
    await manager._backend.close()


async def until(condition: Callable[[], bool], bound_s: float = 20.0) -> None:
    """Waits for what no event tells. Raises TimeoutError."""
    async with asyncio.timeout(bound_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def request(ident: str, retention: Retention = Retention.CHOSEN, principal: str = "alice") -> SessionRequest:
    kind = {Retention.RETAINED: KeyKind.RETAINED, Retention.CONNECTION: KeyKind.CONNECTION}
    return SessionRequest(SessionKey(principal, kind.get(retention, KeyKind.REQUEST), ident), retention)


def attach(manager: SessionManager, ident: str, retention: Retention = Retention.CHOSEN) -> Attachment:
    return manager.attach(request(ident, retention))


def text_of(outcome: Outcome) -> str:
    """Everything that the code said."""
    output = outcome.output
    return "".join([output.head, output.tail, outcome.value or "", outcome.error or ""])
