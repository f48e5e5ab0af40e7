"""What a call costs as work grows: more sessions, more output, more past calls, more records."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from pathlib import Path

from benchmarks.bench import Bench, session
from benchmarks.cases.load import PRINT
from benchmarks.processes import tool_host
from benchmarks.raw_client import RawClient
from benchmarks.samples import Operation, Variant, take_turns
from benchmarks.tables import Table
from sandboxes.spec import KeyKind, Retention, SessionKey
from sandboxes.stores.base import SessionRecord
from sandboxes.stores.sqlite import SqliteStore

BATCH = 20


async def run(bench: Bench) -> list[Table]:
    if "bubblewrap" not in bench.backends:
        return []
    return [await _sessions(bench), await _output(bench), await _past(bench), await _ledger(bench)]


def _call(client: RawClient, code: str = "1+1") -> Operation:
    return lambda: client.call("python", {"code": code})


async def _sessions(bench: Bench) -> Table:
    """Hosts side by side, each with its own number of idle sessions."""
    variants: dict[str, Variant] = {}
    async with contextlib.AsyncExitStack() as stack:
        for count in (1, 10, 100, 500) if bench.full else (1, 10, 50):
            host = await stack.enter_async_context(bench.host("bubblewrap", LIFECYCLE__MAX_SESSIONS=count + 10))
            clients = [await session(host, f"grown-{number}") for number in range(count)]
            for some in range(0, count, 8):
                await asyncio.gather(*(_call(client)() for client in clients[some : some + 8]))
            variants[f"{count} sessions"] = Variant(_call(clients[0]), BATCH)
        rows = await take_turns(variants, rounds=bench.pick(5, 20))
    note = "Bubblewrap; one session calls, the others are open and idle, on a host of their own number each."
    return Table("growth-sessions", "A call, by open sessions", "s", next(iter(rows)), rows, note)


async def _output(bench: Bench) -> Table:
    async with bench.host("bubblewrap") as host:
        client = await session(host, "prints")
        variants = {
            shown: Variant(_call(client, PRINT.format(lines=size // 100)))
            for shown, size in (("1 kB", 10**3), ("10 kB", 10**4), ("100 kB", 10**5), ("1 MB", 10**6), ("10 MB", 10**7))
        }
        rows = await take_turns(variants, rounds=bench.pick(5, 20))
    return Table("growth-output", "A call, by what it prints", "s", "1 kB", rows, "Bubblewrap.")


async def _past(bench: Bench) -> Table:
    """Two sessions of one host take turns: one that has made no calls yet, and one that has made many."""
    past = bench.pick(300, 1000)
    async with bench.host("bubblewrap") as host:
        old, new = await session(host, "old"), await session(host, "new")
        for _ in range(past):
            await old.call("python", {"code": "1+1"})
        variants = {"few past calls": Variant(_call(new), BATCH), f"{past} past calls": Variant(_call(old), BATCH)}
        rows = await take_turns(variants, rounds=bench.pick(5, 20))
    return Table("growth-calls", "A call, by past calls of its session", "s", "few past calls", rows, "Bubblewrap.")


async def _ledger(bench: Bench) -> Table:
    count = bench.pick(2_000, 10_000)
    variants: dict[str, Variant] = {}
    starts: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        for records in (0, count):
            directory = bench.directory / f"ledger-{records}"
            directory.mkdir()
            await _fill(directory / "bubblewrap" / "ledger.sqlite", records)
            began = time.perf_counter()
            host = await stack.enter_async_context(tool_host(directory, "bubblewrap"))
            started = time.perf_counter() - began
            client = await session(host, "only")
            variants[f"{records} closed sessions in the ledger"] = Variant(_call(client), BATCH)
            starts.append(f"{started:.1f} s with {records}")
        rows = await take_turns(variants, rounds=bench.pick(5, 20))
    note = f"Bubblewrap. The host was up after {', '.join(starts)}."
    return Table("growth-ledger", "A call, by records in the ledger", "s", next(iter(rows)), rows, note)


async def _fill(path: Path, records: int) -> None:
    store = SqliteStore(path)
    await store.open()
    now = time.time()
    for some in range(0, records, 500):
        await asyncio.gather(*(_closed(store, number, now) for number in range(some, min(some + 500, records))))
    await store.close()


async def _closed(store: SqliteStore, number: int, now: float) -> None:
    key = SessionKey("anonymous", KeyKind.REQUEST, f"past-{number}")
    record = SessionRecord(key, Retention.REQUEST, "closed", secrets.token_hex(12), now, now, closed_at=now)
    await store.put(record, expected_version=None)
