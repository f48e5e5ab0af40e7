"""A host on loopback: a real uvicorn over a stand-in session manager."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.toolhost.rawclient import Stream
from tests.toolhost.standin import StandInManager
from toolhost.app import HostApp, create_app
from toolhost.cli.serve import HostServer, listening
from toolhost.config import Settings, load
from toolhost.services import build


@dataclass
class Host:
    port: int
    app: HostApp
    manager: StandInManager
    settings: Settings
    server: uvicorn.Server

    async def connect(
        self, path: str = "/python/sse", headers: list[tuple[str, str]] | None = None, **more: Any
    ) -> Stream:
        """An initialized connection."""
        stream = await Stream.open(self.port, path, headers, **more)
        assert stream.status == 200, stream.status
        await stream.initialize()
        return stream


StartHost = Callable[..., Awaitable[Host]]


@asynccontextmanager
async def running(flags: dict[str, Any]) -> AsyncIterator[Host]:
    settings = load(flags=flags)
    manager = StandInManager()
    app = create_app(build(settings, manager))
    ipv6 = ":" in settings.server.address[0]
    listener = listening(settings) if ipv6 else socket.create_server(("127.0.0.1", 0))
    started = asyncio.Event()
    server = HostServer(uvicorn.Config(app, log_config=None, access_log=False), started.set)
    task = asyncio.create_task(server.serve([listener]))
    try:
        await started.wait()
        yield Host(listener.getsockname()[1], app, manager, settings, server)
    finally:
        await app.close()
        server.should_exit = True
        await asyncio.wait_for(task, 15)
        listener.close()


@pytest.fixture
async def start_host(tmp_path: Path) -> AsyncIterator[StartHost]:
    async with AsyncExitStack() as stack:

        async def start(**groups: Any) -> Host:
            return await stack.enter_async_context(running({"state_dir": str(tmp_path), **groups}))

        yield start


@pytest.fixture
async def host(start_host: StartHost) -> Host:
    return await start_host()
