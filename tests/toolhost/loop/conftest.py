"""Fixtures of the loop's tests: a fake model and a real MCP server, both on loopback."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.toolhost.loop.mcp_double import Double, serving
from toolhost.loop import fake_model
from toolhost.loop.driver import LoopDriver
from toolhost.loop.executor import Clocks
from toolhost.loop.fake_model import FakeModel
from toolhost.loop.ids import CountingIds
from toolhost.loop.models.registry import connect
from toolhost.loop.tool_client import Endpoint, McpToolServer

Rounds = list[dict[str, Any]]
MakeLoop = Callable[..., Awaitable[tuple[LoopDriver, FakeModel]]]


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    async with serving() as server:
        yield server


@pytest.fixture
async def tool_server(double: Double) -> McpToolServer:
    names = ("python", "browser", "container")
    endpoints = [Endpoint.parse(double.at(name)) for name in names]
    return await McpToolServer.connect([*endpoints, Endpoint.parse(f"http://{double.at('files')}/mcp")])


@pytest.fixture
async def make_loop(tool_server: McpToolServer) -> AsyncIterator[MakeLoop]:
    """`make_loop(rounds, dialect="chat", **driver)`: a driver over a fake model with this script, and the model.

    Ids count and the wall clock stands still, so that equal runs give equal objects.
    """
    async with AsyncExitStack() as stack:

        async def make(rounds: Rounds, dialect: str = "chat", **fields: Any) -> tuple[LoopDriver, FakeModel]:
            model, url = await stack.enter_async_context(fake_model.serving(rounds))
            client = connect(dialect, url, timeout=30)
            stack.push_async_callback(client.aclose)
            defaults: dict[str, Any] = {
                "tools": tool_server,
                "ids": CountingIds(),
                "clocks": Clocks(lambda: 1_800_000_000.0, time.monotonic),
            }
            return LoopDriver(client, **{**defaults, **fields}), model

        yield make
