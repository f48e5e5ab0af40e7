"""What a process and its descendants use, where no control group counts it.

Above: the bubblewrap backend. Below: `/proc`. In a pid namespace every orphan becomes a child of PID 1, so the
descendants of PID 1 are all that runs in it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from sandboxes.spec import Usage

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _Row:
    parent: int
    ticks: int  # its own cpu time, and that of children it has waited for
    pages: int


def usage(pid: int, proc: Path = Path("/proc")) -> Usage:
    """Memory (shared pages counted once per process), cpu time and number of processes."""
    rows: dict[int, _Row] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in proc.iterdir():
        if entry.name.isdigit() and (row := _row(entry)) is not None:
            rows[int(entry.name)] = row
            children[row.parent].append(int(entry.name))
    waiting, found = [pid], []
    while waiting:
        current = waiting.pop()
        if current in rows:
            found.append(rows[current])
            waiting += children[current]
    return Usage(
        memory_bytes=sum(row.pages for row in found) * PAGE,
        cpu_s=sum(row.ticks for row in found) / TICKS,
        processes=len(found),
    )


def _row(entry: Path) -> _Row | None:
    try:
        text = (entry / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return _Row(int(fields[1]), sum(int(field) for field in fields[11:15]), int(fields[21]))
