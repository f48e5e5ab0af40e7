"""Where a run's tables go: JSON and Markdown files, and the marked regions of README.md and docs/performance.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import tables, targets
from benchmarks.tables import Table

BEGIN, END = "<!-- benchmark: begin (python -m benchmarks --readme) -->", "<!-- benchmark: end -->"
README = (  # the others are in docs/performance.md
    "warm",
    "first",
    "pandas",
    "concurrent",
    "memory-machine",
    "memory-processes",
)


def write(directory: Path, machine: Mapping[str, object], found: Sequence[Table]) -> str:
    """benchmark.json and benchmark.md; returns the Markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json = {"machine": dict(machine), "tables": {table.name: table.as_json() for table in found}}
    (directory / "benchmark.json").write_text(json.dumps(as_json, indent=1) + "\n")
    text = whole(machine, found)
    (directory / "benchmark.md").write_text(text)
    return text


def whole(machine: Mapping[str, object], found: Sequence[Table]) -> str:
    asked = targets.markdown(targets.targets({table.name: table for table in found}))
    return tables.markdown(machine, found) + "\n" + asked


def into_documents(root: Path, machine: Mapping[str, object], found: Sequence[Table]) -> None:
    """Replaces the marked regions. Raises ValueError when a file has none."""
    short = tables.markdown(machine, [table for table in found if table.name in README])
    _replace(root / "README.md", short)
    _replace(root / "docs" / "performance.md", whole(machine, found))


def _replace(path: Path, text: str) -> None:
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no region between {BEGIN!r} and {END!r}")
    path.write_text(f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}")
