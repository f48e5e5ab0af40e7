"""A call in a session that exists: the figure that nobody publishes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from mcp import ClientSession
from mcp.client.sse import sse_client

from benchmarks.bare_client import BareClient
from benchmarks.bench import Bench, session
from benchmarks.peers import containers, peer
from benchmarks.processes import cpu_s, server
from benchmarks.raw_client import RawClient
from benchmarks.samples import Operation, Samples, Variant, take_turns
from benchmarks.tables import Table

CODE = {"code": "1+1"}
EMPTY = "an empty tool on the same SDK"
CPU_CALLS = 500


async def run(bench: Bench) -> list[Table]:
    variants: dict[str, Variant] = {}
    pids: dict[str, int] = {}
    async with contextlib.AsyncExitStack() as stack:
        port, pids[EMPTY] = await stack.enter_async_context(server("empty-mcp"))
        empty = RawClient("127.0.0.1", port, "/sse")
        await empty.connect()
        stack.push_async_callback(empty.close)
        variants[f"{EMPTY}, raw client"] = Variant(lambda: empty.call("empty", {}), 25)
        official = await stack.enter_async_context(connected(f"http://127.0.0.1:{port}/sse"))
        variants[f"{EMPTY}, official client"] = _official(official, "empty", {})
        for name in bench.backends:
            host = await stack.enter_async_context(bench.host(name))
            assert host.process is not None
            pids[f"toolhost, {name}"] = host.process.pid
            raw = await session(host, "warm")
            stack.push_async_callback(raw.close)
            variants[f"toolhost, {name}, raw client"] = Variant(_call(raw), 25)
            url = f"{host.url}/python/sse"
            official = await stack.enter_async_context(connected(url, {"x-session-id": "official"}))
            variants[f"toolhost, {name}, official client"] = _official(official, "python", CODE)
        port, _ = await stack.enter_async_context(server("bare"))
        bare = await stack.enter_async_context(BareClient.open(port))
        variants["bare starlette, one POST"] = Variant(bare.post, 25)
        await _add_peers(bench, stack, variants)
        times = await take_turns(variants, rounds=bench.pick(8, 30), budget_s=bench.pick(60, 100))
        cpu = await _cpu(variants, pids)
    note = "One call of `1+1` in a session that exists, over loopback; clients of ours take turns in one process."
    base = f"{EMPTY}, raw client"
    cpu_note = "Cpu of the server process for one call, all its threads; sandboxes are not in it."
    return [
        Table("warm", "Call in an existing session", "s", base, times, note, dict(bench.left_out)),
        Table("cpu", "Host cpu for a call", "s", EMPTY, cpu, cpu_note),
    ]


@contextlib.asynccontextmanager
async def connected(url: str, headers: dict[str, str] | None = None) -> AsyncIterator[ClientSession]:
    """The official client."""
    async with sse_client(url, headers=headers) as streams, ClientSession(*streams) as client:
        await client.initialize()
        yield client


def _call(client: RawClient) -> Operation:
    async def call() -> None:
        text = await client.call("python", CODE)
        if text != "2":
            raise RuntimeError(f"it answered {text[:200]!r}")

    return call


def _official(client: ClientSession, tool: str, arguments: dict[str, str]) -> Variant:
    return Variant(lambda: client.call_tool(tool, arguments), 10)


async def _add_peers(bench: Bench, stack: contextlib.AsyncExitStack, variants: dict[str, Variant]) -> None:
    kernel = await stack.enter_async_context(peer(bench, "ipykernel"))
    if kernel is not None:
        variants["ipykernel through jupyter_client"] = Variant(lambda: kernel.seconds("run"), 10)
    sandbox = await stack.enter_async_context(peer(bench, "llm-sandbox"))
    if sandbox is not None:
        variants["llm-sandbox, session kept open"] = Variant(lambda: sandbox.seconds("run"))
    engine = await stack.enter_async_context(containers(bench))
    if engine is not None:
        variants["docker exec of one line"] = Variant(engine.execute)
        variants["gpt-oss's docker tool, re-created"] = Variant(engine.call_of_gpt_oss)


async def _cpu(variants: dict[str, Variant], pids: dict[str, int]) -> dict[str, Samples]:
    found: dict[str, Samples] = {name: Samples() for name in pids}
    for _ in range(3):
        for name, pid in pids.items():
            call = variants[f"{name}, raw client"].operation
            before = cpu_s(pid)
            for _number in range(CPU_CALLS // 3):
                await call()
            found[name].values.append((cpu_s(pid) - before) / (CPU_CALLS // 3))
    return found
