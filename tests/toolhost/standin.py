"""A session manager without sandboxes, behind the manager's API: code runs here, in this process, in tests only."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import time
import traceback
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandboxes.errors import AttemptUnknown, CallRefused, SandboxError, SessionUnknown
from sandboxes.events import OnEvent
from sandboxes.files import FileInfo, Listing
from sandboxes.resources import Resource, ResourceFactory
from sandboxes.spec import (
    Ending,
    Execution,
    Outcome,
    Output,
    PythonCall,
    Receipt,
    Retention,
    SessionKey,
    SessionRequest,
    State,
)


@dataclass
class Session:
    variables: dict[str, Any] = field(default_factory=dict)
    sequence: int = 0


@dataclass
class StandInManager:
    """`sessions`: what was called into. `events`: what was done to it, in order. `failure`: raised by each call."""

    sessions: dict[SessionKey, Session] = field(default_factory=dict)
    outcomes: dict[tuple[SessionKey, str], Outcome] = field(default_factory=dict)
    executions: list[Execution] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    failure: Exception | None = None
    unhealthy: SandboxError | None = None
    outcome: Outcome | None = None  # answered instead of running anything
    contents: dict[str, bytes] = field(default_factory=dict)
    resources: dict[tuple[SessionKey, str], Resource] = field(default_factory=dict)
    saved: dict[tuple[SessionKey, str], dict[str, bytes]] = field(default_factory=dict)  # what a restart would find
    running: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def open(self) -> None:
        self.events.append("open")

    async def close(self) -> None:
        self.events.append("close")

    def attach(self, request: SessionRequest) -> StandInAttachment:
        return StandInAttachment(self, request)

    async def collect(self, key: SessionKey, attempt_id: str) -> Outcome:
        try:
            return self.outcomes[key, attempt_id]
        except KeyError:
            raise AttemptUnknown(f"no attempt {attempt_id!r} in this session") from None

    def files(self, key: SessionKey) -> StandInFiles:
        return StandInFiles(self, key)

    async def resource_parts(self, key: SessionKey, name: str) -> Mapping[str, bytes]:
        if not any(known == key for known, _ in self.saved):
            raise SessionUnknown("no open session of this key is known")
        return self.saved.get((key, name), {})

    async def health(self) -> None:
        self.events.append("health")
        if self.unhealthy is not None:
            raise self.unhealthy

    async def note(self, event: str) -> None:
        async with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    async def until(self, event: str) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: event in self.events)


@dataclass
class StandInFiles:
    manager: StandInManager
    key: SessionKey

    async def list(self, path: str = ".") -> Listing:
        self._known()
        found = [FileInfo(name, len(data), 0.0, "file") for name, data in self.manager.contents.items()]
        return Listing(found, complete=True)

    async def get(self, path: str, max_bytes: int) -> AsyncIterator[bytes]:
        self._known()
        if path not in self.manager.contents:
            raise CallRefused("no such file (links are not followed)")
        yield self.manager.contents[path]

    def _known(self) -> None:
        if self.key not in self.manager.sessions:
            raise SessionUnknown("no open session of this key is known", session=str(self.key))


@dataclass
class StandInAttachment:
    manager: StandInManager
    request: SessionRequest

    @property
    def key(self) -> SessionKey:
        return self.request.key

    async def run(self, execution: Execution, on_event: OnEvent | None = None) -> Outcome:
        manager = self.manager
        manager.executions.append(execution)
        if manager.failure is not None:
            raise manager.failure
        if manager.outcome is not None:
            return manager.outcome
        session = manager.sessions.setdefault(self.key, Session())
        session.sequence += 1
        assert isinstance(execution.call, PythonCall)
        if execution.call.code == "wait":
            await manager.note("running")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                manager.events.append("interrupted")
                async with manager.changed:
                    manager.changed.notify_all()
                raise
        outcome = _run(execution, execution.call.code, session, str(self.key))
        manager.outcomes[self.key, outcome.receipt.attempt_id] = outcome
        return outcome

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        return self.manager.contents[path]

    async def resource(self, name: str, factory: ResourceFactory) -> Resource:
        found = self.manager.resources.get((self.key, name))
        if found is None:
            found = self.manager.resources[self.key, name] = factory(self.manager.saved.get((self.key, name), {}))
        return found

    async def save(self, name: str) -> None:
        saved = self.manager.saved.setdefault((self.key, name), {})
        for part, state in self.manager.resources[self.key, name].changes().items():
            if state is None:
                saved.pop(part, None)
            else:
                saved[part] = state

    async def cleanup(self) -> None:
        await self.manager.note(f"cleanup {self.key}")
        if self.request.retention is not Retention.RETAINED:
            self.manager.sessions.pop(self.key, None)

    async def gone(self) -> None:
        await self.manager.note(f"gone {self.key}")
        if self.request.retention is Retention.CONNECTION:
            self.manager.sessions.pop(self.key, None)


def _run(execution: Execution, code: str, session: Session, key: str) -> Outcome:
    began = time.time()
    value, error, printed = None, None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec"), session.variables)
            if isinstance(last, ast.Expr):
                found = eval(compile(ast.Expression(last.value), "<cell>", "eval"), session.variables)
                value = None if found is None else repr(found)
        except Exception:  # noqa: BLE001 - whatever the code raises is its result
            error = traceback.format_exc(limit=0)
    receipt = Receipt(
        session=key,
        epoch=1,
        sequence=session.sequence,
        attempt_id=execution.attempt_id or f"host-{session.sequence}",
        digest=execution.digest(),
        queued_at=began,
        started_at=began,
        ended_at=time.time(),
        ending=Ending.RAISED if error else Ending.OK,
        state=State.KEPT,
    )
    return Outcome(receipt, Output(printed.getvalue()), value=value, error=error)
