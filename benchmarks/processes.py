"""Processes that are measured: servers on a free port of loopback, and what the kernel says of their cpu and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.host import RunningHost, free_port

READY_S = 30.0


@contextlib.asynccontextmanager
async def server(kind: str) -> AsyncIterator[tuple[int, int]]:
    """One of `benchmarks.servers`. Yields its port and pid."""
    port = free_port()
    async with process([sys.executable, "-m", "benchmarks.servers", kind, str(port)], port) as pid:
        yield port, pid


@contextlib.asynccontextmanager
async def process(command: list[str], port: int, environment: Mapping[str, str] | None = None) -> AsyncIterator[int]:
    """A server process that listens on this port of loopback. Yields its pid."""
    started = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.DEVNULL, env=environment)
    try:
        await _until_open(port, started)
        yield started.pid
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(started.wait, 5)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextlib.asynccontextmanager
async def tool_host(directory: Path, backend: str, **settings: str) -> AsyncIterator[RunningHost]:
    """`toolhost serve` with these settings (names as in the environment, without `TOOLHOST_`). All it made goes with
    it, its sandboxes too."""
    environment = {"TOOLHOST_LIFECYCLE__ON_STOP": "close", "TOOLHOST_LOG__LEVEL": "warning"}
    environment |= {f"TOOLHOST_{name}": value for name, value in settings.items()}
    host = RunningHost(directory / backend, backend=backend, environment=environment)
    await asyncio.to_thread(host.start)
    try:
        yield host
    finally:
        if host.running():
            await asyncio.to_thread(host.terminate, 120.0)


async def _until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the server to compare with did not start") from None
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return


# --- what the kernel says -------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """Seconds of cpu that a process has used so far, in all its threads (those that ended are not counted)."""
    total = 0
    for task in _listed(Path(f"/proc/{pid}/task")):
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def memory_bytes(pids: Iterable[int]) -> int:
    """What processes take of the machine: pages that they share with others count by their share (PSS)."""
    return _rollup(pids, "Pss:")


def own_memory_bytes(pids: Iterable[int]) -> int:
    """The part of it that is no file's: a file's pages can be given back at any time."""
    return _rollup(pids, "Pss_Anon:")


def _rollup(pids: Iterable[int], field: str) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(field):
                    total += int(line.split()[1]) << 10
    return total


def everything() -> dict[int, int]:
    """All processes of the machine, with their parents."""
    return dict(_parents())


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents = everything()
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def memory_used_bytes() -> int:
    """Of the whole machine, kernel memory too, what could be given back not counted."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])) << 10


def _parents() -> Iterator[tuple[int, int]]:
    for entry in _listed(Path("/proc")):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                yield int(entry.name), int(stat.rpartition(")")[2].split()[1])


def _listed(directory: Path) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory)]  # noqa: PTH208 - many small files
    except OSError:
        return []
