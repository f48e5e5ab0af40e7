"""Measures toolhost beside what people use today, in one run: ratios count, times are this machine's.

usage: python -m benchmarks [--full] [--case NAME ...] [--output DIRECTORY] [--readme]

Writes benchmark.json and benchmark.md into the directory, after each case, and prints the Markdown. What is missing
here is named in the tables and left out. A case that fails is reported, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import machine, report
from benchmarks.bench import Bench, missing
from benchmarks.cases import browser, cluster, gateway, growth, load, memory, start, warm
from benchmarks.tables import Table

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
LONGEST_S = 400.0  # one case


ROOT = Path(__file__).parent.parent


async def measure(cases: list[str], *, full: bool, done: Callable[[Sequence[Table]], None]) -> tuple[list[Table], bool]:
    """The tables of these cases, and whether all went well. `done`: told of all tables so far, after each case."""
    tables: list[Table] = []
    well = True
    with tempfile.TemporaryDirectory(prefix="toolhost-bench-") as directory:
        bench = Bench(Path(directory), full, missing())
        for name in cases:
            began = time.monotonic()
            try:
                async with asyncio.timeout(LONGEST_S):
                    tables += await CASES[name](bench)
            except Exception:  # noqa: BLE001 - the figures of the other cases are not lost with it
                well = False
                print(f"{name} failed:", file=sys.stderr)
                traceback.print_exc()
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            done(tables)
    return tables, well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more samples and more sessions: about 10 minutes")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one (may be repeated)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    parser.add_argument(
        "--readme", action="store_true", help="write the tables into README.md and docs/performance.md too"
    )
    arguments = parser.parse_args()
    facts = machine.facts() | {"mode": "full" if arguments.full else "quick"}

    def done(tables: Sequence[Table]) -> None:
        now = facts | {"load after": machine.facts()["load before"]}
        report.write(arguments.output, now, tables)

    # The clients share the processors with what they measure: they are as light as they can be.
    loop = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
    with asyncio.Runner(loop_factory=loop) as runner:
        tables, well = runner.run(measure(arguments.case or list(CASES), full=arguments.full, done=done))
    facts["load after"] = machine.facts()["load before"]
    if arguments.readme:
        report.into_documents(ROOT, facts, tables)
    print(report.whole(facts, tables))
    if not well:
        sys.exit(1)


if __name__ == "__main__":
    main()
