"""`kill -9` at seeded moments with SQLite: every id that was ever shown is found afterwards, in a true state."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.toolhost.gateway.processes import GatewayProcess
from tests.toolhost.loop.checks import check_items, check_stream
from tests.toolhost.loop.mcp_double import serving
from toolhost.loop import fake_model

PYTHON: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}
CALL: dict[str, Any] = {"name": "python", "arguments": {"code": "print(6 * 7)"}}
TALKERS = 3


async def test_every_exposed_id_is_in_a_true_state_after_each_of_eight_kills(tmp_path: Path) -> None:
    await kills(tmp_path, range(8))


@pytest.mark.torture
@pytest.mark.timeout(3600)
async def test_every_exposed_id_is_in_a_true_state_after_each_of_thirty_kills(tmp_path: Path) -> None:
    await kills(tmp_path, range(100, 130))


async def kills(directory: Path, seeds: range) -> None:
    rounds: list[dict[str, Any]] = [
        {
            "text": "Thinking",
            "calls": [{"name": "python", "arguments": {"code": "print(6 * 7)"}}],
            "when": "odd",
            "keep": True,
        },
        {"text": "a plain answer of a few words", "chunk": 3, "keep": True},
    ]
    async with serving() as double, fake_model.serving(rounds) as (_, url):
        # The script would call tools for ever: the bound on rounds ends it.
        gateway = GatewayProcess(
            directory, "gateway", "--model-url", url, "--tools", double.at("python"), TOOLHOST_GATEWAY__MAX_ROUNDS="3"
        )
        await asyncio.to_thread(gateway.start)
        exposed: set[str] = set()
        try:
            for seed in seeds:
                await one_kill(gateway, random.Random(seed), exposed)
                await asyncio.to_thread(gateway.start)
                await check_all(gateway, exposed)
        finally:
            gateway.stop()
        assert len(exposed) >= len(seeds)


async def one_kill(gateway: GatewayProcess, chance: random.Random, exposed: set[str]) -> None:
    """Some clients talk; after so many events altogether the gateway dies."""
    seen, moment, reached = 0, chance.randint(1, 60), asyncio.Event()

    async def talk(client: openai.AsyncOpenAI, background: bool, odd: bool) -> None:
        nonlocal seen
        with contextlib.suppress(openai.APIError, *_BROKEN):
            while True:
                stream = await client.responses.create(
                    model="fake", input="odd" if odd else "even", tools=[PYTHON], stream=True, background=background
                )
                async for event in stream:
                    if event.type == "response.created":
                        exposed.add(event.response.id)
                    seen += 1
                    if seen >= moment:
                        reached.set()

    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        talkers = [asyncio.create_task(talk(client, n % 2 == 0, chance.random() < 0.5)) for n in range(TALKERS)]
        async with asyncio.timeout(60):
            await reached.wait()
        gateway.kill()
        await asyncio.gather(*talkers)


async def check_all(gateway: GatewayProcess, exposed: set[str]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        for ident in exposed:
            found = await client.responses.retrieve(ident)
            assert found.status in ("completed", "incomplete", "failed", "cancelled"), (ident, found.status)
            events = [event async for event in await client.responses.retrieve(ident, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            items = check_items(events)
            assert [item.id for item in items] == [item.id for item in found.output]
            if found.status in ("completed", "incomplete"):
                assert check_stream(events) == found
            elif found.status == "failed":
                assert events[-1].type == "response.failed"
                assert events[-1].response.model_dump() == found.model_dump()


_BROKEN: tuple[type[BaseException], ...] = (OSError,)
with contextlib.suppress(ImportError):
    import httpx2

    _BROKEN = (*_BROKEN, httpx2.HTTPError)
with contextlib.suppress(ImportError):
    import httpx

    _BROKEN = (*_BROKEN, httpx.HTTPError)
