"""`toolhost run`: one question through the loop, from a terminal or in a pipe."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Annotated

import platformdirs
import typer

from toolhost import interrupts
from toolhost.cli.checks import CANNOT_START, fail, secret, session_id, utf8
from toolhost.loop.errors import LoopError, RequestError
from toolhost.loop.models.registry import ADAPTERS
from toolhost.loop.trace import FileTraces

CANCELLED = 130


def default_traces() -> Path:
    """Where runs leave their traces."""
    return platformdirs.user_state_path("toolhost") / "traces"


def run(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    model: Annotated[str, typer.Option(help="Base URL of the model server, up to /v1.")],
    tools: Annotated[str, typer.Option(help="Comma-separated HOST:PORT/namespace, or MCP URLs.")] = "",
    name: Annotated[str, typer.Option(help="The model's name; the server's first one if not given.")] = "",
    dialect: Annotated[str, typer.Option(help=f"What the server speaks: {', '.join(ADAPTERS)}.")] = "chat",
    instructions: Annotated[str, typer.Option(help="Instructions for the model.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print every event as one line of JSON.")] = False,
    approve: Annotated[bool, typer.Option("--approve", help="Ask before each tool call.")] = False,
    max_rounds: Annotated[int, typer.Option(help="Model rounds before one last round without tools.", min=1)] = 20,
    deadline: Annotated[float | None, typer.Option(help="Seconds for the whole run.", min=0.1)] = None,
    session: Annotated[str, typer.Option(help="A session key whose state the tools keep.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the model server's key.")] = None,
    trace_dir: Annotated[Path | None, typer.Option(help="Where the trace is written.")] = None,
) -> None:
    """Ask a model that may use tools, and watch it work.

    Ctrl-C cancels the model and the tool; a second one ends the command at once.
    """
    if importlib.util.find_spec("openai") is None:
        typer.echo("toolhost run needs the openai package: pip install 'toolhost[loop]'", err=True)
        raise typer.Exit(1)
    for text, what in ((question, "the question"), (instructions, "--instructions"), (name, "--name")):
        utf8(text, what)
    if session:
        session_id(session)
    traces = _traces(trace_dir or default_traces())
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # its clients log what is reported as a result here
    key = secret(api_key_file, "key") if api_key_file else None
    try:
        # Here, because the rest of the command line neither needs the extra nor should wait for it to load.
        from toolhost.cli.run_loop import Options, ask_and_watch

        options = Options(
            question=question,
            url=model,
            tools=[spec for spec in tools.split(",") if spec.strip()],
            model=name,
            dialect=dialect,
            instructions=instructions,
            as_json=as_json,
            approve=approve,
            max_rounds=max_rounds,
            deadline=deadline,
            session=session,
            api_key=key,
        )
        code = interrupts.run(ask_and_watch(options, traces))
    except LoopError as error:
        typer.echo(f"toolhost run: {error}", err=True)
        code = CANNOT_START if isinstance(error, RequestError) else 1
    except (KeyboardInterrupt, typer.Abort):  # before there was a run to cancel, or at the question for consent
        typer.echo("toolhost run: cancelled", err=True)
        code = CANCELLED
    raise typer.Exit(code)


def _traces(directory: Path) -> FileTraces:
    """Where the trace goes, there before the run is: afterwards it would be too late to choose another place."""
    traces = FileTraces(directory)
    try:
        traces.prepare()
    except OSError as error:
        fail(f"cannot make the directory of traces {directory}: {error.strerror or error}")
    return traces
