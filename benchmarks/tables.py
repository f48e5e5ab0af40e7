"""What a case gives back: a table of variants with one that the others are compared to, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.samples import Samples

UNITS = {"s": ("ms", 1e3), "bytes": ("MiB", 1 / (1 << 20)), "per_s": ("1/s", 1.0), "MB/s": ("MB/s", 1.0)}


@dataclass
class Table:
    """`unit`: of the samples, one of UNITS. `base`: the row that has ratio 1. `note`: how to read it."""

    name: str
    title: str
    unit: str
    base: str
    rows: Mapping[str, Samples]
    note: str = ""
    left_out: dict[str, str] = field(default_factory=dict)

    def ratio(self, row: str) -> float | None:
        """Median over the base's median; None where one of them was not measured."""
        base, samples = self.rows.get(self.base), self.rows.get(row)
        if base is None or samples is None or not base.values or not samples.values or not base.median:
            return None
        return samples.median / base.median

    def as_json(self) -> dict[str, object]:
        rows = {name: {**samples.summary(), "ratio": self.ratio(name)} for name, samples in self.rows.items()}
        return {
            "title": self.title,
            "unit": self.unit,
            "base": self.base,
            "rows": rows,
            "note": self.note,
            "left_out": self.left_out,
        }

    def as_markdown(self) -> str:
        unit, factor = UNITS[self.unit]
        lines = [f"### {self.title}", ""]
        if self.note:
            lines += [self.note, ""]
        lines += [f"| | median {unit} | min | max | n | ratio |", "|---|---:|---:|---:|---:|---:|"]
        for name, samples in self.rows.items():
            lines.append(f"| {name} | {self._cells(name, samples, factor)} |")
        for name, why in self.left_out.items():
            lines.append(f"| {name} | left out: {why} | | | | |")
        return "\n".join([*lines, ""])

    def _cells(self, name: str, samples: Samples, factor: float) -> str:
        if not samples.values:
            return f"failed: {samples.error or 'not measured'} | | | |"
        figures = [samples.median, min(samples.values), max(samples.values)]
        ratio = self.ratio(name)
        shown = [f"{value * factor:.3g}" if value * factor < 1000 else f"{value * factor:.0f}" for value in figures]
        return " | ".join([*shown, str(len(samples.values)), "" if ratio is None else f"{ratio:.3g}"])


def markdown(machine: Mapping[str, object], tables: Sequence[Table]) -> str:
    facts = "; ".join(f"{name} {value}" for name, value in machine.items())
    return "\n".join([f"Measured on: {facts}.", "", *(table.as_markdown() for table in tables)])
