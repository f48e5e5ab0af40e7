"""A gateway on a real socket over a fake model and a real MCP server, and OpenAI's client in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from tests.toolhost.gateway import redis_server as redis_server_module
from tests.toolhost.gateway.redis_server import RedisServer
from tests.toolhost.loop.mcp_double import Double, serving
from toolhost.auth import Authenticator
from toolhost.config import Settings, load
from toolhost.gateway.app import create_app
from toolhost.gateway.assembly import assemble
from toolhost.gateway.service import Gateway
from toolhost.loop import fake_model
from toolhost.loop.fake_model import FakeModel
from toolhost.loop.tool_client import Endpoint, McpToolServer

Rounds = list[dict[str, Any]]


@dataclass
class Served:
    """A running gateway, its model, and its clients."""

    gateway: Gateway
    url: str
    model: FakeModel
    settings: Settings
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def as_user(self, token: str) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0)
        self.clients.append(client)
        return client


Serve = Callable[..., Awaitable[Served]]


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[str]:
    """An ASGI application on a free port of loopback."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="on")
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    task = asyncio.create_task(server.serve([socket]))
    while not server.started:
        await asyncio.sleep(0.005)
        if task.done():
            raise AssertionError("the gateway did not start")
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task
        socket.close()


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    async with serving() as server:
        yield server


@pytest.fixture
async def tool_server(double: Double) -> McpToolServer:
    endpoints = [Endpoint.parse(double.at(name)) for name in ("python", "browser", "container")]
    return await McpToolServer.connect([*endpoints, Endpoint.parse(f"http://{double.at('files')}/mcp")])


@asynccontextmanager
async def gateway_over(
    tools: McpToolServer, state_dir: Path, rounds: Rounds, tokens: Path | None = None, **gateway: Any
) -> AsyncIterator[Served]:
    """A gateway over a fake model with this script, on this state directory; `gateway` are its settings."""
    async with AsyncExitStack() as stack:
        model, model_url = await stack.enter_async_context(fake_model.serving(rounds))
        flags = {
            "state_dir": str(state_dir),
            "gateway": {"model_url": model_url, "model": "fake", **gateway},
            "auth": {"tokens_file": tokens},
        }
        settings = load(flags=flags)
        made = assemble(settings.gateway, settings.state_dir, tools)
        stack.push_async_callback(made.close)
        url = await stack.enter_async_context(running(create_app(made, Authenticator(settings), settings)))
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
        served = Served(made, url, model, settings, client, http, [client])
        yield served
        for one in served.clients:
            await one.close()


@pytest.fixture
async def serve(tool_server: McpToolServer, tmp_path: Path) -> AsyncIterator[Serve]:
    """`serve(rounds, **gateway settings)`: see `gateway_over`."""
    async with AsyncExitStack() as stack:

        async def start(rounds: Rounds, **options: Any) -> Served:
            return await stack.enter_async_context(gateway_over(tool_server, tmp_path / "state", rounds, **options))

        yield start


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if redis_server_module.PATH is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
