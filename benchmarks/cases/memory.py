"""What a session takes while nothing runs in it."""

from __future__ import annotations

import asyncio
import subprocess

from benchmarks.bench import Bench, session
from benchmarks.peers import peer
from benchmarks.processes import memory_bytes, memory_used_bytes, tree
from benchmarks.raw_client import RawClient
from benchmarks.samples import Samples
from benchmarks.tables import Table
from sandboxes.backends.docker_container import LABEL
from sandboxes.owner import Owner
from tests.support.host import RunningHost

SETTLE_S = 8.0  # the agent's workers end, and the kernel frees what it had for processes that are gone


async def run(bench: Bench) -> list[Table]:
    rows: dict[str, Samples] = {}
    counts = {"bubblewrap": bench.pick(20, 500), "docker": bench.pick(5, 20)}
    for name in bench.backends:
        await _backend(bench, name, counts[name], rows)
    async with peer(bench, "ipykernel", start="") as kernel:
        if kernel is not None:
            pid = (await kernel.ask("start"))["pid"]
            rows["ipykernel, its process (PSS)"] = Samples([float(memory_bytes(tree(pid)))])
    note = (
        "By the machine's memory before and after, divided by the sessions: agent, interpreter, the engine's shim, the "
        "kernel's share. PSS: the processes' own, and their part of what they share. One cell has run in each."
    )
    left_out = {name: why for name, why in bench.left_out.items() if name != "llm-sandbox"}
    return [Table("memory", "Memory of an idle session", "bytes", next(iter(rows), ""), rows, note, left_out)]


async def _backend(bench: Bench, name: str, count: int, rows: dict[str, Samples]) -> None:
    async with bench.host(name, LIFECYCLE__MAX_SESSIONS=count + 10) as host:
        assert host.process is not None
        own = memory_bytes([host.process.pid])
        await _open(host, 0)
        await asyncio.sleep(SETTLE_S)
        before = memory_used_bytes()
        clients = [await _open(host, number) for number in range(1, count + 1)]
        await asyncio.sleep(SETTLE_S)
        machine = (memory_used_bytes() - before) / count
        processes = memory_bytes(_sandboxes(name, host)) / (count + 1)
        rows[f"toolhost, {name}, {count} sessions: by the machine"] = Samples([machine])
        rows[f"toolhost, {name}, {count} sessions: PSS"] = Samples([processes])
        after = memory_bytes([host.process.pid])
        rows[f"toolhost, {name}: the host, before any session"] = Samples([float(own)])
        rows[f"toolhost, {name}: the host, {count + 1} sessions"] = Samples([float(after)])
        await asyncio.gather(*(client.close() for client in clients))


async def _open(host: RunningHost, number: int) -> RawClient:
    client = await session(host, f"idle-{number}")
    await client.call("python", {"code": "1+1"})
    return client


def _sandboxes(backend: str, host: RunningHost) -> list[int]:
    """Processes of the sandboxes, shims left out."""
    assert host.process is not None
    if backend == "bubblewrap":
        return [pid for pid in tree(host.process.pid) if pid != host.process.pid]
    label = f"label={LABEL}owner={Owner.load(host.state_dir).id}"
    listed = ["docker", "ps", "-q", "--filter", label]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    inspected = ["docker", "inspect", "-f", "{{.State.Pid}}", *names]
    pids = subprocess.run(inspected, capture_output=True, text=True, check=True).stdout.split()
    return [pid for root in pids for pid in tree(int(root))]
