"""How commands show things and ask: tables on a terminal, lines in a pipe. What came from outside is made safe.

Above: `cli.sessions`, `cli.prune`. Below: rich.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

NOTHING, USAGE = 1, 2  # exit codes
NAMED = 20  # of those that a question is about
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def safe(text: object) -> str:
    """Text on one line that cannot command a terminal: what is not printable is shown as an escape."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in str(text)
    ).replace("\udcff", "?")


def terminal() -> bool:
    return sys.stdout.isatty()


def rows(header: Sequence[str], found: Sequence[Sequence[object]]) -> None:
    """A table with a header on a terminal; else a line a row, values between tabs, without a header."""
    if terminal():
        Console(highlight=False).print(table(header, found))
        return
    for row in found:
        typer.echo("\t".join(safe("" if value is None else value) for value in row))


def table(header: Sequence[str], found: Sequence[Sequence[object]]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        made.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in found:
        made.add_row(*(Text(safe("-" if value is None else value)) for value in row))
    return made


def size(value: int | None) -> str | None:
    if value is None:
        return None
    if value < 1024:
        return f"{value} B"
    amount, unit = float(value), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount >= 1024:
            amount, unit = amount / 1024, larger
    return f"{amount:.1f} {unit}"


def span(seconds: float | None) -> str | None:
    """A duration for people, in its largest units."""
    if seconds is None:
        return None
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} m {int(seconds % 60)} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} m" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def duration(text: str) -> float:
    """Seconds of `90`, `30s`, `10m`, `2h`, `1d`. Raises typer.BadParameter."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is not a duration: for example 90, 30s, 10m, 2h, 1d")
    return float(match[1]) * _UNITS[match[2]]


def confirm(question: str, names: list[str], yes: bool) -> None:
    """Asks on a terminal; elsewhere nobody could answer, and nothing is done without --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{question} Nobody can be asked here: add --yes", USAGE)
    for name in names[:NAMED]:
        typer.echo(f"  {safe(name)}", err=True)
    if len(names) > NAMED:
        typer.echo(f"  … and {len(names) - NAMED} more", err=True)
    if not typer.confirm(question, err=True):
        raise typer.Exit(NOTHING)


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr; the exit code says which kind."""
    typer.echo(f"toolhost: {safe(message)}", err=True)
    raise typer.Exit(code)
