"""From nothing to the first result: connecting, new sessions cold and from the pool, the first cell with pandas."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time

from benchmarks.bench import Bench, session
from benchmarks.machine import settled
from benchmarks.peers import containers, peer
from benchmarks.processes import server
from benchmarks.raw_client import RawClient
from benchmarks.samples import Operation, Samples, Variant, take_turns
from benchmarks.tables import Table
from tests.support.host import RunningHost

PANDAS = "import numpy as np, pandas as pd\nint(pd.DataFrame({'a': np.arange(3)}).a.sum())"
POOL = 3
# For the pool to begin to fill again, after the sandbox before has ended.
REFILL_S = {"bubblewrap": 0.5, "docker": 2.5}
_idents = itertools.count()


async def run(bench: Bench) -> list[Table]:
    return [await _connect(bench), *await _sessions(bench), await _burst(bench)]


async def _connect(bench: Bench) -> Table:
    async with contextlib.AsyncExitStack() as stack:
        port, _ = await stack.enter_async_context(server("empty-mcp"))
        base = "an empty tool on the same SDK"
        variants = {base: Variant(lambda: _handshake(port, "/sse"), 5)}
        if bench.backends:
            host = await stack.enter_async_context(bench.host(bench.backends[0]))
            variants["toolhost"] = Variant(lambda: _handshake(host.port, "/python/sse"), 5)
        rows = await take_turns(variants, rounds=bench.pick(8, 40))
    note = "A new connection, until `initialize` is answered. It starts no sandbox, whatever the backend."
    return Table("connect", "Connect and initialize", "s", base, rows, note)


async def _handshake(port: int, path: str) -> float:
    client = RawClient("127.0.0.1", port, path)
    began = time.perf_counter()
    await client.connect()
    took = time.perf_counter() - began
    await client.close()
    return took


async def _sessions(bench: Bench) -> list[Table]:
    first: dict[str, Variant] = {}
    pandas: dict[str, Variant] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name in bench.backends:
            cold = await stack.enter_async_context(bench.host(name))
            pooled = await stack.enter_async_context(
                bench.host(name, LIFECYCLE__POOL=POOL, PYTHON__PREIMPORTS='["numpy","pandas"]')
            )
            wait = _pause(REFILL_S[name])
            first[f"toolhost, {name}, from the pool"] = Variant(_first(pooled, "1+1"), before=wait)
            first[f"toolhost, {name}, cold"] = Variant(_first(cold, "1+1"), 2, settled)
            pandas[f"toolhost, {name}, from the pool, pre-imported"] = Variant(_first(pooled, PANDAS), before=wait)
            pandas[f"toolhost, {name}, cold"] = Variant(_first(cold, PANDAS), before=settled)
        engine = await stack.enter_async_context(containers(bench))
        if engine is not None:
            first["a bare container: create and start"] = Variant(engine.create_and_start, 2, settled)
        kernel = await stack.enter_async_context(peer(bench, "ipykernel"))
        if kernel is not None:
            first["ipykernel: start to first result"] = Variant(lambda: kernel.seconds("start"), 2, settled)
        rounds = bench.pick(4, 12)
        firsts = await take_turns(first, rounds=rounds, budget_s=bench.pick(60, 120))
        pandases = await take_turns(pandas, rounds=rounds, budget_s=bench.pick(60, 90))
    note = (
        "From the call on an open connection of a new session to its result; the machine was at rest before each. "
        "Of a turn's starts without a pool the first is not counted: it wakes up what slept while others had theirs."
    )
    left_out = {name: why for name, why in bench.left_out.items() if name != "llm-sandbox"}
    base = "toolhost, bubblewrap, from the pool"
    return [
        Table("first", "New session to first result", "s", base, firsts, note, left_out),
        Table("pandas", "First cell with pandas in a new session", "s", f"{base}, pre-imported", pandases),
    ]


def _first(host: RunningHost, code: str) -> Operation:
    """The first call of a new session, which is ended after it."""

    async def first() -> float:
        client = await session(host, f"new-{next(_idents)}")
        try:
            began = time.perf_counter()
            await client.call("python", {"code": code})
            took = time.perf_counter() - began
            await client.call("cleanup_session", {})
        finally:
            await client.close()
        return took

    return first


def _pause(seconds: float) -> Operation:
    async def pause() -> None:
        await asyncio.sleep(seconds)
        await settled()

    return pause


async def _burst(bench: Bench) -> Table:
    rows: dict[str, Samples] = {}
    left_out: dict[str, str] = {}
    counts = {"bubblewrap": 100, "docker": bench.pick(10, 30)}
    for name in bench.backends:
        count = counts[name]
        async with bench.host(name, LIFECYCLE__MAX_SESSIONS=count + 10, LIFECYCLE__MAX_QUEUE=count) as host:
            clients = [await session(host, f"burst-{number}") for number in range(count)]
            began = time.perf_counter()
            ends = await asyncio.gather(*(_timed(client) for client in clients))
            total = time.perf_counter() - began
            rows[f"toolhost, {name}: {count} at once, each"] = Samples(list(ends))
            rows[f"toolhost, {name}: {count} at once, all"] = Samples([total])
            await asyncio.gather(*(client.close() for client in clients))
    if not rows:
        left_out = dict(bench.left_out)
    note = "Cold, no pool. A session's time runs from the moment at which all of them ask."
    return Table("burst", "Bursts of new sessions", "s", next(iter(rows), ""), rows, note, left_out)


async def _timed(client: RawClient) -> float:
    began = time.perf_counter()
    await client.call("python", {"code": "1+1"})
    return time.perf_counter() - began
