"""Measures toolhost beside what people use today, in one run: ratios count, times are this machine's.

usage: python -m benchmarks [--full] [--case NAME ...] [--output DIRECTORY]

Writes benchmark.json and benchmark.md into the directory and prints the Markdown. What is missing here is named in the
tables and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.bench import Bench, missing
from benchmarks.cases import browser, cluster, gateway, growth, load, memory, start, warm
from benchmarks.tables import Table, markdown

CASES = {
    "warm": warm.run,
    "start": start.run,
    "load": load.run,
    "memory": memory.run,
    "growth": growth.run,
    "browser": browser.run,
    "gateway": gateway.run,
    "cluster": cluster.run,
}
OUTPUT = Path(".cache") / "benchmarks"


async def measure(cases: list[str], *, full: bool) -> list[Table]:
    """The tables of these cases. What fails of itself is in them; a case that fails as a whole is reported."""
    tables: list[Table] = []
    with tempfile.TemporaryDirectory(prefix="toolhost-bench-") as directory:
        bench = Bench(Path(directory), full, missing())
        for name in cases:
            began = time.monotonic()
            tables += await CASES[name](bench)
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more samples and more sessions: about 15 minutes")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one (may be repeated)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    arguments = parser.parse_args()
    facts = machine.facts() | {"mode": "full" if arguments.full else "quick"}
    tables = asyncio.run(measure(arguments.case or list(CASES), full=arguments.full))
    facts["load after"] = machine.facts()["load before"]
    arguments.output.mkdir(parents=True, exist_ok=True)
    found = {"machine": facts, "tables": {table.name: table.as_json() for table in tables}}
    (arguments.output / "benchmark.json").write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(facts, tables)
    (arguments.output / "benchmark.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
