"""What the Responses gateway adds to the model's answer: many streams at once, beside the same streams without it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.processes import cpu_s, process
from benchmarks.samples import Samples, Variant, take_turns
from benchmarks.stream_client import StreamClient, Streamed
from benchmarks.tables import Table
from tests.support.host import free_port

STREAMS = 100
FRAGMENTS = 60
DELAY_S = 0.05
TEXT = "".join(f"word{number:03} " for number in range(FRAGMENTS))
STREAM_S = FRAGMENTS * DELAY_S
DIRECT, GATEWAY, ADDED = "the model alone", "through the gateway", "added by the gateway"
Check = Callable[[Streamed], None]


@dataclass
class Target:
    """An endpoint that streams. `check` raises when an event is missing. `cpu`: seconds per event, one each turn."""

    clients: list[StreamClient]
    body: dict[str, Any]
    check: Check
    pid: int
    cpu: Samples = field(default_factory=Samples)

    async def steady(self) -> float:
        """Streams that begin evenly over the time that one takes, so that they are all at once but begin apart.

        The median time to the first text of those that begin while all others are running, in seconds.
        """
        found: list[float] = []
        began = time.perf_counter()
        cpu, events = cpu_s(self.pid), 0

        async def one(number: int, client: StreamClient) -> None:
            nonlocal events
            await asyncio.sleep(number * STREAM_S / STREAMS)
            for _ in range(3):
                full = time.perf_counter() - began > STREAM_S
                streamed = await self._post(client)
                events += len(streamed.events)
                if full:
                    found.append(streamed.first_s)

        await asyncio.gather(*(one(number, client) for number, client in enumerate(self.clients)))
        self.cpu.values.append((cpu_s(self.pid) - cpu) / events)
        return statistics.median(found)

    async def burst(self) -> float:
        """All begin in the same moment."""
        return statistics.median([one.first_s for one in await asyncio.gather(*map(self._post, self.clients))])

    async def _post(self, client: StreamClient) -> Streamed:
        streamed = await client.post(self.body)
        self.check(streamed)
        return streamed


async def run(bench: Bench) -> list[Table]:
    async with contextlib.AsyncExitStack() as stack:
        direct, gateway = await stack.enter_async_context(targets(bench.directory))
        rounds, budget_s = bench.pick(3, 6), bench.pick(45, 60)
        steady = await _compared(direct.steady, gateway.steady, rounds, budget_s)
        burst = await _compared(direct.burst, gateway.burst, rounds, budget_s)
    each = f"{STREAMS} streams at once of {FRAGMENTS} events, {1 / DELAY_S:g} a second each"
    return [
        Table(
            "gateway-first-text",
            "Time to the first text",
            "s",
            DIRECT,
            steady,
            f"{each}; new ones begin evenly, {STREAMS / STREAM_S:.0f} a second. A sample is the median of one turn. "
            "Model, gateway (SQLite) and client are a process each on the same processors. Every event was checked.",
        ),
        Table(
            "gateway-burst",
            "Time to the first text, all in the same moment",
            "s",
            DIRECT,
            burst,
            f"{STREAMS} requests sent at once: the median one waits for 50 others.",
        ),
        Table(
            "gateway-cpu",
            "Cpu per event",
            "s",
            DIRECT,
            {DIRECT: direct.cpu, GATEWAY: gateway.cpu},
            f"{each}, their beginnings and ends included. The gateway's events are about as many as the model's.",
        ),
    ]


async def _compared(
    direct: Callable[[], Awaitable[float]], gateway: Callable[[], Awaitable[float]], rounds: int, budget_s: float
) -> dict[str, Samples]:
    rows = await take_turns({DIRECT: Variant(direct), GATEWAY: Variant(gateway)}, rounds=rounds, budget_s=budget_s)
    added = [ours - theirs for theirs, ours in zip(rows[DIRECT].values, rows[GATEWAY].values, strict=False)]
    return {**rows, ADDED: Samples(added, rows[GATEWAY].error or rows[DIRECT].error)}


@contextlib.asynccontextmanager
async def targets(directory: Path) -> AsyncIterator[tuple[Target, Target]]:
    """The fake model, and a gateway in front of it."""
    script = directory / "model.json"
    script.write_text(json.dumps([{"text": TEXT, "chunk": len(TEXT) // FRAGMENTS, "delay": DELAY_S, "keep": True}]))
    model_port, port = free_port(), free_port()
    model = [sys.executable, "-m", "toolhost.loop.fake_model", str(script), "--port", str(model_port)]
    gateway = [sys.executable, "-m", "toolhost", "gateway", "--model-url", f"http://127.0.0.1:{model_port}/v1"]
    gateway += ["--listen", f"127.0.0.1:{port}", "--state-dir", str(directory / "gateway")]
    async with contextlib.AsyncExitStack() as stack:
        model_pid = await stack.enter_async_context(process(model, model_port))
        quiet = {**os.environ, "TOOLHOST_LOG__LEVEL": "warning"}
        pid = await stack.enter_async_context(process(gateway, port, quiet))
        chat = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        responses = {"model": "fake", "input": "Hi", "stream": True}
        alone = _clients(stack, model_port, "/v1/chat/completions", b'"content": "word')
        behind = _clients(stack, port, "/v1/responses", b"response.output_text.delta")
        yield Target(alone, chat, _whole_chat, model_pid), Target(behind, responses, _whole, pid)


def _clients(stack: contextlib.AsyncExitStack, port: int, path: str, mark: bytes) -> list[StreamClient]:
    clients = [StreamClient(port, path, mark) for _ in range(STREAMS)]
    for client in clients:
        stack.push_async_callback(client.close)
    return clients


def _whole_chat(streamed: Streamed) -> None:
    deltas = [event["choices"][0]["delta"].get("content", "") for event in streamed.events if event["choices"]]
    if "".join(deltas) != TEXT:
        raise RuntimeError(f"the model's text is not whole: {deltas}")


def _whole(streamed: Streamed) -> None:
    events = streamed.events
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    numbers = [event["sequence_number"] for event in events]
    if numbers != list(range(len(events))) or deltas != _words() or events[-1]["type"] != "response.completed":
        raise RuntimeError(f"events were lost: numbers {numbers}, text {''.join(deltas)!r}")


def _words() -> list[str]:
    size = len(TEXT) // FRAGMENTS
    return [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
