"""`toolhost trace`: what happened in a run, call by call, with verdicts and times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolhost.cli.printable import printable
from toolhost.cli.run import default_traces
from toolhost.loop.errors import LoopError
from toolhost.loop.trace import FileTraces

_TEXT_CHARACTERS = 60
_OTHER_COLUMNS = 48


def trace(
    response: Annotated[str, typer.Argument(help="The response's id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole trace as JSON.")] = False,
    trace_dir: Annotated[Path | None, typer.Option(help="Where traces are.")] = None,
) -> None:
    """Show a run's rounds, calls, verdicts and times."""
    try:
        data = FileTraces(trace_dir or default_traces()).load(response)
    except LoopError as error:
        typer.echo(f"toolhost trace: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        text = json.dumps(data, indent=1, ensure_ascii=False)
        typer.echo(text.encode("utf-8", "backslashreplace").decode())  # half of a surrogate pair as its escape
        return
    console = Console()
    console.print(f"{escape(data['response_id'])}: {data['ending']} ({data['why']}), model {escape(data['model'])}")
    times = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in data["times"].items())
    console.print(f"time: {times}")
    console.print(_table(data, console.width))


def _table(data: dict[str, Any], width: int) -> Table:
    """The generation has a column only where there were several: a narrow terminal has no room to give away."""
    several = len({entry["generation"] for entry in data["entries"] if "generation" in entry}) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", overflow="fold", min_width=6)
    if several:
        table.add_column("generation", justify="right", min_width=1)
    table.add_column("seconds", justify="right", no_wrap=True, min_width=7)
    table.add_column("outcome", overflow="fold", min_width=9)
    table.add_column("detail", overflow="fold")
    verdicts = {call["call_id"]: call for call in data["calls"]}
    for entry in data["entries"]:
        seconds = entry.get("seconds", entry.get("tool_seconds"))
        row = [
            _what(entry),
            "" if seconds is None else f"{seconds:.3f}",
            _outcome(entry, verdicts),
            _detail(entry, width),
        ]
        if several:
            row.insert(1, str(entry.get("generation", "")))
        table.add_row(*(escape(cell) for cell in row))
    return table


def _what(entry: dict[str, Any]) -> str:
    name = entry.get("tool") or entry.get("name") or ""
    return printable(f"{entry['kind']} {name}".strip())


def _outcome(entry: dict[str, Any], verdicts: dict[str, dict[str, Any]]) -> str:
    if entry["kind"] == "round":
        return str(entry["stop"])
    if entry["kind"] == "call":
        call = verdicts.get(entry["call_id"], {})
        arrived = [one["verdict"] for one in call.get("arrivals", ())]
        flag = " (flagged)" if call.get("flagged") else ""
        return f"{entry.get('terminal', '')}: {', '.join(arrived) or 'nothing came'}{flag}"
    return str(entry.get("verdict") or entry.get("why") or "")


def _detail(entry: dict[str, Any], width: int) -> str:
    called = ", ".join(one["name"] for one in entry["calls"]) if entry["kind"] == "round" else ""
    text = entry.get("text") or entry.get("output") or called
    if not text and entry.get("arguments"):
        text = json.dumps(entry["arguments"], ensure_ascii=False)
    line = printable(" ".join(str(text).split()))
    room = min(_TEXT_CHARACTERS, max(_OTHER_COLUMNS // 4, width - _OTHER_COLUMNS))
    return line if len(line) <= room else f"{line[:room]}…"
