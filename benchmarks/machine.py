"""Where and when it was measured."""

from __future__ import annotations

import importlib.util
import os
import platform
from datetime import UTC, datetime
from pathlib import Path


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


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
