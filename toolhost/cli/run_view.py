"""How `toolhost run` shows a run's events: live in a terminal, plain in a pipe, or as JSON lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from toolhost.cli.printable import printable
from toolhost.loop.events import wire_json

_OUTPUT_CHARACTERS = 2000
"""How much of a tool's output is shown; the trace has it whole."""


class View(Protocol):
    """Shows events. `show` is called for each, in order, `close` after the last; `note` in between for what the events
    cannot say."""

    def show(self, event: Any) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class UntilBroken:
    """A view for as long as its output takes what it shows; `broken` is what ended that, and nothing is shown after."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.broken: OSError | None = None

    def show(self, event: Any) -> None:
        self._try(lambda: self._view.show(event))

    def note(self, text: str) -> None:
        self._try(lambda: self._view.note(text))

    def close(self) -> None:
        self._try(self._view.close)

    def _try(self, show: Callable[[], None]) -> None:
        if self.broken is not None:
            return
        try:
            show()
        except OSError as error:
            self.broken = error
            for stream in (sys.stdout, sys.stderr):
                _let_go(stream)


class JsonView:
    """Every event as one line of JSON on standard output."""

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out = out
        self._notes = notes

    def show(self, event: Any) -> None:
        self._out.write(wire_json(event) + "\n")
        self._out.flush()

    def note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)

    def close(self) -> None:
        pass


class PlainView:
    """The answer on standard output; what led to it on standard error."""

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out = out
        self._notes = notes
        self._wrote = False

    def show(self, event: Any) -> None:
        if event.type in ("response.output_text.delta", "response.refusal.delta"):
            self._out.write(printable(event.delta))
            self._out.flush()
            self._wrote = True
        elif event.type == "response.output_item.done":
            for line in item_lines(event.item):
                print(line, file=self._notes, flush=True)
        elif problem := problem_of(event):
            self.note(problem)

    def note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)

    def close(self) -> None:
        if self._wrote:
            self._out.write("\n")
            self._out.flush()


class LiveView:
    """Reasoning, calls, output and answer as they come, in a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._at_start = True

    def show(self, event: Any) -> None:
        match event.type:
            case "response.reasoning_text.delta":
                self._write(event.delta, "dim italic")
            case "response.output_text.delta":
                self._write(event.delta, "")
            case "response.refusal.delta":
                self._write(event.delta, "yellow")
            case "response.reasoning_text.done" | "response.output_text.done":
                self._new_line()
            case "response.code_interpreter_call_code.done":
                self._new_line()
                self._console.print("[bold cyan]python[/]")
                self._console.print(Syntax(printable(event.code), "python", background_color="default"))
            case "response.output_item.done":
                self._item(event.item)
            case _ if problem := problem_of(event):
                self.note(problem)

    def note(self, text: str) -> None:
        self._new_line()
        self._console.print(f"[bold red]{escape(text)}[/]")

    def close(self) -> None:
        self._new_line()

    def _item(self, item: Any) -> None:
        lines = item_lines(item)
        if not lines or item.type == "reasoning":
            return
        self._new_line()
        if item.type == "code_interpreter_call":
            lines = lines[1:]
        else:
            self._console.print(f"[bold cyan]{escape(lines[0])}[/]")
            lines = lines[1:]
        for line in lines:
            self._console.print(f"[green]{escape(line)}[/]")

    def _write(self, text: str, style: str) -> None:
        text = printable(text)
        self._console.print(text, style=style or None, end="", markup=False, highlight=False, soft_wrap=True)
        self._at_start = text.endswith("\n") if text else self._at_start

    def _new_line(self) -> None:
        if not self._at_start:
            self._console.print()
        self._at_start = True


def make_view(as_json: bool) -> UntilBroken:
    """The view that fits standard output."""
    if as_json:
        return UntilBroken(JsonView(sys.stdout, sys.stderr))
    console = Console()
    return UntilBroken(LiveView(console) if console.is_terminal else PlainView(sys.stdout, sys.stderr))


def item_lines(item: Any) -> list[str]:
    """A finished item as lines: what was called, then what came of it. Messages are shown while they come."""
    match item.type:
        case "reasoning":
            return [f"reasoning: {line}" for part in item.content or () for line in printable(part.text).splitlines()]
        case "code_interpreter_call":
            outputs = [part.logs for part in item.outputs or () if part.type == "logs"]
            return [f"python: {printable(item.code or '')}", *_shown("\n".join(outputs), item.status)]
        case "web_search_call":
            action = item.action
            what = getattr(action, "query", None) or getattr(action, "pattern", None) or getattr(action, "url", None)
            return [f"browser {action.type}: {printable(what or '')}", *_shown("", item.status)]
        case "mcp_call":
            error = item.error.model_dump() if item.error is not None else {}
            said = item.output or error.get("message") or "".join(one["text"] for one in error.get("content") or ())
            call = f"{item.server_label}.{item.name} {item.arguments}"
            return [printable(call), *_shown(said, item.status)]
        case "mcp_approval_request":
            return [printable(f"needs approval: {item.server_label}.{item.name} {item.arguments}")]
    return []


def problem_of(event: Any) -> str:
    """What went wrong, where an event says so. Why a response is incomplete its event has no word for."""
    return f"failed: {printable(event.response.error.message)}" if event.type == "response.failed" else ""


def _let_go(stream: TextIO) -> None:
    """If a stream is broken, let what it still holds go nowhere: the interpreter's exit would complain of it."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _shown(output: str, status: str | None) -> list[str]:
    text = printable(output)
    cut = f"{text[:_OUTPUT_CHARACTERS]} …" if len(text) > _OUTPUT_CHARACTERS else text
    lines = [f"  {line}" for line in cut.splitlines()]
    return lines if status == "completed" else [*lines, f"  ({status})"]
