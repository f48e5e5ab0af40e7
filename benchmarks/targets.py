"""What issues 9 and 11 ask for, beside what was measured: one table of sentences, each with its figures.

Ratios and differences are of medians of one run, so they hold on a machine of another speed; times and sizes are named
with the machine (2 cores).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.samples import Samples
from benchmarks.tables import Table

EMPTY = "an empty tool on the same SDK"
MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """`measured`: the figure as it is shown; None, and `met` too, where it was not measured."""

    what: str
    asked: str
    measured: str | None
    met: bool | None


class _Medians:
    """Medians by table and the beginning of a row's name."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = tables

    def __call__(self, table: str, row: str) -> float | None:
        found = self._tables.get(table)
        rows: Mapping[str, Samples] = found.rows if found is not None else {}
        for name, samples in rows.items():
            if name.startswith(row) and samples.values:
                return samples.median
        return None


def targets(tables: Mapping[str, Table]) -> list[Target]:
    """In the order of the issue."""
    return list(_targets(_Medians(tables)))


def _targets(median: _Medians) -> Iterator[Target]:
    for backend in ("bubblewrap", "docker"):
        warm = median("warm", f"toolhost, {backend}, raw client")
        empty = median("warm", f"{EMPTY}, raw client")
        yield _of(f"a warm `1+1`, {backend}", "the empty tool + 0.5 ms", (warm, empty), _above, lambda v: v <= 0.5)
        gpt = median("warm", "gpt-oss's docker tool")
        yield _of("… beside gpt-oss's docker call", "200 times faster", (gpt, warm), _times, lambda v: v >= 200)
        run = median("warm", "docker exec")
        yield _of("… beside `docker exec`", "50 times faster", (run, warm), _times, lambda v: v >= 50)
        kernel = median("warm", "ipykernel")
        yield _of("… beside ipykernel's round trip", "at most half", (warm, kernel), _share, lambda v: v <= 0.5)
    for backend in ("bubblewrap", "docker"):
        first = median("first", f"toolhost, {backend}, from the pool")
        yield _of(f"first result from the pool, {backend}", "5 ms", (first,), _ms, lambda v: v <= 5)
    cold = median("first", "toolhost, bubblewrap, cold")
    yield _of("first result cold, bubblewrap", "30 ms", (cold,), _ms, lambda v: v <= 30)
    cold, bare = median("first", "toolhost, docker, cold"), median("first", "a bare container")
    yield _of("first result cold, docker", "1.2 x a bare container", (cold, bare), _share, lambda v: v <= 1.2)
    ours, theirs = median("connect", "toolhost"), median("connect", EMPTY)
    yield _of("connect and initialize", "1.1 x the empty server", (ours, theirs), _share, lambda v: v <= 1.1)
    for backend in ("bubblewrap", "docker"):
        pandas = median("pandas", f"toolhost, {backend}, from the pool")
        yield _of(f"first pandas cell from the pool, {backend}", "under 15 ms", (pandas,), _ms, lambda v: v < 15)
    for backend, most in (("bubblewrap", 8), ("docker", 12)):
        idle = _mib(median("memory-machine", f"toolhost, {backend}"))
        yield Target(
            f"an idle session, {backend}", f"{most} MiB", *_judged(idle, "MiB", idle is not None and idle <= most)
        )
    host = _mib(median("memory-host", "toolhost, bubblewrap, 5"))
    yield Target("the host with 500 sessions", "under 200 MiB", *_judged(host, "MiB", host is not None and host < 200))
    rate, floor = median("concurrent", "toolhost, bubblewrap"), median("concurrent", EMPTY)
    yield _of("100 sessions at once", "0.8 of the empty tool", (rate, floor), _share, lambda v: v >= 0.8)
    for backend in ("bubblewrap", "docker"):
        printed = median("output", f"toolhost, {backend}, 10 MB")
        met = printed is not None and printed >= 100
        yield Target(f"10 MB printed, {backend}", "100 MB/s", *_judged(printed, "MB/s", met))
    behind, alone = median("gateway-first-text", "through the gateway"), median("gateway-first-text", "the model alone")
    asked = "under 10 ms more than the model alone (issue 10)"
    yield _of("first text of 100 streams through the gateway", asked, (behind, alone), _above, lambda v: v < 10)
    for what, table, most in (("new session's first result", "cluster-start", 10.0), ("call", "cluster-call", 0.2)):
        there, here = median(table, "bubblewrap, on a node"), median(table, "bubblewrap, on this machine")
        yield _of(f"a {what} on a cluster", f"one machine + {most:g} ms", (there, here), _above, _at_most(most))


Figures = tuple[float | None, ...]


def _of(
    what: str,
    asked: str,
    figures: Figures,
    show: Callable[..., tuple[float, str]],
    met: Callable[[float], bool],
) -> Target:
    if any(figure is None for figure in figures):
        return Target(what, asked, None, None)
    value, shown = show(*figures)
    return Target(what, asked, shown, met(value))


def _at_most(most: float) -> Callable[[float], bool]:
    return lambda value: value <= most


def _judged(value: float | None, unit: str, met: bool) -> tuple[str | None, bool | None]:
    return (None, None) if value is None else (f"{value:.3g} {unit}", met)


def _above(value: float, base: float) -> tuple[float, str]:
    more = (value - base) * 1e3
    return more, f"+ {more:.2f} ms ({value * 1e3:.2f} to {base * 1e3:.2f})"


def _times(value: float, base: float) -> tuple[float, str]:
    return value / base, f"{value / base:.0f} times"


def _share(value: float, base: float) -> tuple[float, str]:
    return value / base, f"{value / base:.2f}"


def _ms(value: float) -> tuple[float, str]:
    return value * 1e3, f"{value * 1e3:.1f} ms"


def _mib(value: float | None) -> float | None:
    return None if value is None else value / MIB


def markdown(found: list[Target]) -> str:
    """A table; what was not measured is left out."""
    lines = ["### What was asked for", "", "| | asked | measured | met |", "|---|---|---|---|"]
    for target in found:
        if target.measured is not None:
            lines.append(f"| {target.what} | {target.asked} | {target.measured} | {'yes' if target.met else 'no'} |")
    return "\n".join([*lines, ""])
