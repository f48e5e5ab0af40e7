"""Many at once, and much output."""

from __future__ import annotations

import asyncio
import contextlib
import time

from benchmarks.bare_client import BareClient
from benchmarks.bench import Bench, session
from benchmarks.processes import server
from benchmarks.raw_client import RawClient
from benchmarks.samples import Operation, Variant, take_turns
from benchmarks.tables import Table

SESSIONS = 100
PRINT = "import sys\n_ = sys.stdout.write(('x' * 99 + '\\n') * {lines})"
MEGABYTE = 1_000_000


async def run(bench: Bench) -> list[Table]:
    return [await _concurrent(bench), await _output(bench)]


async def _concurrent(bench: Bench) -> Table:
    calls = bench.pick(5, 20)
    base = "an empty tool on the same SDK"
    async with contextlib.AsyncExitStack() as stack:
        port, _ = await stack.enter_async_context(server("empty-mcp"))
        empty = [RawClient("127.0.0.1", port, "/sse") for _ in range(SESSIONS)]
        for client in empty:
            await client.connect()
        variants = {base: Variant(_rate(empty, "empty", {}, calls))}
        counts = {"bubblewrap": SESSIONS, "docker": bench.pick(20, SESSIONS)}
        for name in bench.backends:
            host = await stack.enter_async_context(bench.host(name, LIFECYCLE__MAX_SESSIONS=SESSIONS + 10))
            clients = [await session(host, f"many-{number}") for number in range(counts[name])]
            for some in range(0, len(clients), 10):
                await asyncio.gather(*(client.call("python", {"code": "1"}) for client in clients[some : some + 10]))
            variants[f"toolhost, {name}, {counts[name]} sessions"] = Variant(
                _rate(clients, "python", {"code": "1+1"}, calls)
            )
        port, _ = await stack.enter_async_context(server("bare"))
        posts = [await stack.enter_async_context(BareClient.open(port)) for _ in range(SESSIONS)]
        variants["bare starlette, one POST"] = Variant(lambda: _posts(posts, calls))
        rows = await take_turns(variants, rounds=bench.pick(3, 8), budget_s=bench.pick(60, 90))
    note = f"{SESSIONS} connections in closed loops; all clients are one process, on the same processors as the server."
    return Table("concurrent", "Calls a second, many sessions at once", "per_s", base, rows, note, dict(bench.left_out))


def _rate(clients: list[RawClient], tool: str, arguments: dict[str, str], calls: int) -> Operation:
    async def loop(client: RawClient) -> None:
        for _ in range(calls):
            await client.call(tool, arguments)

    async def rate() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(loop(client) for client in clients))
        return len(clients) * calls / (time.perf_counter() - began)

    return rate


async def _posts(clients: list[BareClient], calls: int) -> float:
    async def loop(client: BareClient) -> None:
        for _ in range(calls):
            await client.post()

    began = time.perf_counter()
    await asyncio.gather(*(loop(client) for client in clients))
    return len(clients) * calls / (time.perf_counter() - began)


async def _output(bench: Bench) -> Table:
    variants: dict[str, Variant] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name in bench.backends:
            host = await stack.enter_async_context(bench.host(name))
            client = await session(host, "printer")
            stack.push_async_callback(client.close)
            for megabytes in (1, 10):
                variants[f"toolhost, {name}, {megabytes} MB"] = Variant(_printing(client, megabytes))
        rows = await take_turns(variants, rounds=bench.pick(3, 10))
    note = "One cell prints it; the result has head and tail, a file in the session the whole. MB are 10^6 bytes."
    base = next(iter(rows), "")
    return Table("output", "Printed output", "MB/s", base, rows, note, dict(bench.left_out))


def _printing(client: RawClient, megabytes: int) -> Operation:
    code = PRINT.format(lines=megabytes * MEGABYTE // 100)

    async def printing() -> float:
        began = time.perf_counter()
        await client.call("python", {"code": code})
        return megabytes / (time.perf_counter() - began)

    return printing
