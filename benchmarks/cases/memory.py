"""What a session takes while nothing runs in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Bench, session
from benchmarks.peers import peer
from benchmarks.processes import everything, memory_bytes, memory_used_bytes, own_memory_bytes, tree
from benchmarks.raw_client import RawClient
from benchmarks.samples import Samples
from benchmarks.tables import Table
from sandboxes.backends.docker_container import LABEL
from sandboxes.owner import Owner
from tests.support.host import RunningHost

SETTLE_S = 8.0  # the agent's workers end, and the kernel frees what it had for processes that are gone
STEADY_BYTES = 2 << 20
STEADY_ROUNDS = 10

AT_ONCE = 4  # starts
OTHERS_SHARE = 0.05  # of what is measured: by so much the memory of other processes may change meanwhile
ENGINE = ("dockerd", "containerd")
BY_THE_MACHINE = (
    "Its memory in use after and before, divided by the sessions: agent, interpreter, the engine's shim, the kernel's "
    "share. What the host, the clients and others have grown by is taken off. One cell has run in each. Where other "
    "processes' memory changed much meanwhile, it is left out."
)
BY_PROCESSES = "Each process's own memory, and its part of what it shares; the kernel's left out."


async def run(bench: Bench) -> list[Table]:
    machine: dict[str, Samples] = {}
    processes: dict[str, Samples] = {}
    hosts: dict[str, Samples] = {}
    counts = {"bubblewrap": bench.pick(20, 500), "docker": bench.pick(5, 20)}
    for name in bench.backends:
        found = await _backend(bench, name, counts[name], hosts)
        row = f"toolhost, {name}, {counts[name]} sessions"
        machine[row] = found.machine
        processes[row] = Samples([found.processes])
        if found.shims:
            processes[f"{row}: the engine's shim"] = Samples([found.shims])
    async with peer(bench, "ipykernel", start="") as kernel:
        if kernel is not None:
            pid = (await kernel.ask("start"))["pid"]
            processes["ipykernel, its process"] = Samples([float(memory_bytes(tree(pid)))])
    left_out = {name: why for name, why in bench.left_out.items() if name != "llm-sandbox"}
    return [
        _table("memory-machine", "Memory of an idle session, by the machine", machine, BY_THE_MACHINE, left_out),
        _table("memory-processes", "Memory of an idle session, its processes (PSS)", processes, BY_PROCESSES, {}),
        _table("memory-host", "Memory of the host (PSS)", hosts, "", {}),
    ]


def _table(name: str, title: str, rows: dict[str, Samples], note: str, left_out: dict[str, str]) -> Table:
    return Table(name, title, "bytes", next(iter(rows), ""), rows, note, left_out)


@dataclass(frozen=True)
class Found:
    """Bytes of one session."""

    machine: Samples
    processes: float
    shims: float


@dataclass(frozen=True)
class Use:
    """Bytes of the whole machine that are in use, those of the host, the engine and the clients, and those of processes
    that have no part in what is measured."""

    machine: int
    servers: int
    others: int


def of_each(before: Use, after: Use, count: int) -> Samples:
    """What each of `count` sessions has taken of the machine, or why that cannot be told."""
    others = after.others - before.others
    grown = after.machine - before.machine - (after.servers - before.servers) - others
    if grown <= 0 or abs(others) > OTHERS_SHARE * grown:
        return Samples(error=f"other processes' memory changed by {others / (1 << 20):+.0f} MiB meanwhile")
    return Samples([grown / count])


async def _backend(bench: Bench, name: str, count: int, hosts: dict[str, Samples]) -> Found:
    async with bench.host(name, LIFECYCLE__MAX_SESSIONS=count + 10, LIFECYCLE__MAX_QUEUE=count) as host:
        assert host.process is not None
        hosts[f"toolhost, {name}, before any session"] = Samples([float(memory_bytes([host.process.pid]))])
        await _open(host, 0)
        await _steady()
        before = _use(host, _sandboxes(name, host))
        clients = []
        for some in range(1, count + 1, AT_ONCE):
            numbers = range(some, min(some + AT_ONCE, count + 1))
            clients += await asyncio.gather(*(_open(host, number) for number in numbers))
        await asyncio.sleep(SETTLE_S)
        sandboxes = _sandboxes(name, host)
        after = _use(host, sandboxes)
        processes = memory_bytes(sandboxes) / (count + 1)
        shims = memory_bytes(_shims(sandboxes)) / (count + 1)
        hosts[f"toolhost, {name}, {count + 1} sessions"] = Samples([float(memory_bytes([host.process.pid]))])
        await asyncio.gather(*(client.close() for client in clients))
        return Found(of_each(before, after, count), processes, shims)


async def _steady() -> None:
    """Waits until the machine's use stands still: the kernel takes long to free what many sandboxes had (their network
    namespaces go one by one), and what it frees later would be missing from what is measured."""
    used = 0
    for _ in range(STEADY_ROUNDS):
        before, used = used, memory_used_bytes()
        if abs(used - before) < STEADY_BYTES:
            return
        await asyncio.sleep(SETTLE_S)


async def _open(host: RunningHost, number: int) -> RawClient:
    client = await session(host, f"idle-{number}")
    await client.call("python", {"code": "1+1"})
    return client


def _use(host: RunningHost, sandboxes: list[int]) -> Use:
    assert host.process is not None
    measured = {*sandboxes, *_shims(sandboxes)}
    servers = {os.getpid(), host.process.pid, *(pid for pid in everything() if _name(pid) in ENGINE)} - measured
    others = [pid for pid in everything() if pid not in measured | servers]
    return Use(memory_used_bytes(), own_memory_bytes(servers), own_memory_bytes(others))


def _shims(sandboxes: list[int]) -> set[int]:
    """The engine's processes that each hold one of these sandboxes."""
    parents = everything()
    return {parents[pid] for pid in sandboxes if _name(parents.get(pid, 0)).startswith("containerd-shim")}


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


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
