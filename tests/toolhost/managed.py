"""A host on loopback over the real session manager, on the fake backend: everything but the isolation."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from sandboxes.manager import SessionManager
from sandboxes.observer import Observer
from sandboxes.owner import Owner
from sandboxes.settings import ManagerSettings
from sandboxes.spec import Execution, Outcome, PythonCall, Retention, SessionKey
from sandboxes.stores.memory import MemoryStore
from sandboxes.testing.fake_backend import FakeBackend, FakeEngine
from sandboxes.testing.host import request as session_request
from tests.toolhost.rawclient import Answer, Stream, request
from toolhost.app import HostApp, create_app
from toolhost.auth import Authenticator, Scope, mint
from toolhost.cli.serve import HostServer
from toolhost.config import Settings, load
from toolhost.metrics import Metrics
from toolhost.namespaces import registry
from toolhost.observers import Observers
from toolhost.services import Services
from toolhost.tracing import Traces

OWNER = Owner("0123456789abcdef", b"s" * 32)


@dataclass
class ManagedHost:
    port: int
    manager: SessionManager
    engine: FakeEngine
    metrics: Metrics
    tokens: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def headers(self, who: str | None) -> list[tuple[str, str]]:
        return [] if who is None else [("Authorization", f"Bearer {self.tokens[who]}")]

    async def ask(self, path: str, method: str = "GET", body: bytes = b"", who: str | None = None) -> Answer:
        return await request(self.port, path, method=method, body=body, headers=self.headers(who))

    async def json(self, path: str, method: str = "GET", body: bytes = b"", who: str | None = None) -> Any:
        answer = await self.ask(path, method, body, who)
        assert answer.status < 300, answer
        return answer.json()

    async def connect(
        self, session: str | None, who: str | None = None, headers: list[tuple[str, str]] | None = None
    ) -> Stream:
        named = [] if session is None else [("x-session-id", session)]
        stream = await Stream.open(self.port, "/python/sse", [*self.headers(who), *named, *(headers or [])])
        assert stream.status == 200, stream.status
        await stream.initialize()
        return stream

    async def run(
        self,
        ident: str,
        code: str = "1",
        principal: str = "anonymous",
        retention: Retention = Retention.CHOSEN,
        attempt: str = "",
    ) -> Outcome:
        """A call by a connection that stays attached, without HTTP."""
        attachment = self.manager.attach(session_request(ident, retention, principal))
        return await attachment.run(Execution(PythonCall(code), attempt_id=attempt))


def digest_of(ident: str, principal: str = "anonymous", retention: Retention = Retention.CHOSEN) -> str:
    return session_request(ident, retention, principal).key.digest()


def key_of(ident: str, principal: str = "anonymous") -> SessionKey:
    return session_request(ident, Retention.CHOSEN, principal).key


def tokens_file(place: Path, **scopes: tuple[Scope, ...]) -> dict[str, str]:
    """Writes a tokens file; the tokens by name."""
    tokens, lines = {}, []
    for name, granted in scopes.items():
        tokens[name], line = mint(name, granted)
        lines.append(line)
    place.write_text("\n".join(lines))
    return tokens


@contextlib.asynccontextmanager
async def managed(
    directory: Path,
    *,
    tokens: dict[str, str] | None = None,
    observers: tuple[Observer, ...] = (),
    traces: Traces | None = None,
    manager: dict[str, Any] | None = None,
    **groups: Any,
) -> AsyncIterator[ManagedHost]:
    """`groups`: settings. `manager`: of the manager's own. With `tokens`, their file is `directory/tokens`."""
    if tokens is not None:
        groups["auth"] = {**groups.get("auth", {}), "tokens_file": directory / "tokens"}
    settings: Settings = load(flags={"state_dir": directory, **groups})
    engine, metrics = FakeEngine(), Metrics()
    sessions = SessionManager(
        backend=FakeBackend(OWNER, engine),
        store=MemoryStore(),
        owner=OWNER,
        settings=ManagerSettings(**(manager or {})),
        observer=Observers(*observers, metrics, *([] if traces is None else [traces])),
    )
    metrics.watch(lambda: sessions.counts)
    namespaces, auth = registry.create(settings), Authenticator(settings)
    app = create_app(Services(settings, sessions, namespaces, auth, metrics, traces=traces))
    async with _served(app) as port:
        yield ManagedHost(port, sessions, engine, metrics, tokens or {})


@contextlib.asynccontextmanager
async def _served(app: HostApp) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    started = asyncio.Event()
    server = HostServer(uvicorn.Config(app, log_config=None, access_log=False), started.set)
    task = asyncio.create_task(server.serve([listener]))
    try:
        await started.wait()
        yield listener.getsockname()[1]
    finally:
        await app.close()
        server.should_exit = True
        await asyncio.wait_for(task, 15)
        listener.close()
