"""Where and when it was measured."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

SETTLE_S = 3.0
IDLE = 0.9  # of all ticks


def facts() -> dict[str, object]:
    """For the head of a report. The load is that of the last minute, before anything was measured."""
    fast = [name for name in ("uvloop", "httptools") if importlib.util.find_spec(name)]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{os.cpu_count()} x {_processor()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "with": ", ".join(fast) or "neither uvloop nor httptools",
        "load before": round(os.getloadavg()[0], 1),
    }


async def settled() -> None:
    """Returns when the processors have nothing to do: what an operation before has left behind (a sandbox that ends, a
    pool that fills again) is not part of the next one. On a machine that never rests it returns after `SETTLE_S`."""
    until = time.monotonic() + SETTLE_S
    idle, total = _ticks()
    while time.monotonic() < until:
        await asyncio.sleep(0.1)
        idle_before, total_before, (idle, total) = idle, total, _ticks()
        if idle - idle_before >= IDLE * (total - total_before):
            return


def _ticks() -> tuple[int, int]:
    """Of all processors since they started: the idle ticks, and all (proc_stat(5))."""
    ticks = [int(tick) for tick in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
