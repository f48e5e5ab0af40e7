"""The `toolhost` command: argv to calls. One module a command group, loaded only when its command is named.

Above: the console script. Below: services, app, the admin client.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
import typer.core
import typer.main

# Command to "module:attribute" and the line that `toolhost --help` shows. An attribute is a function, or a typer app
# for a group of commands. Modules are imported when their command runs: `--help` must not wait for them.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("toolhost.cli.serve:serve", "Start the tool server and print what to give to vLLM."),
    "run": ("toolhost.cli.run:run", "Ask a model that may use tools, and watch it work."),
    "trace": ("toolhost.cli.trace:trace", "Show what happened in a run, call by call."),
    "call": ("toolhost.cli.call:call", "Call a tool of a running host, from a terminal."),
    "gateway": ("toolhost.cli.gateway:gateway", "Serve /v1/responses over any model and these tools."),
    "stdio": ("toolhost.cli.stdio:stdio", "Serve one desktop client over standard input and output."),
    "setup": ("toolhost.cli.setup:setup", "Make the environment that sandboxes run in (needed once)."),
    "doctor": ("toolhost.cli.doctor:doctor", "Check this machine; say what is wrong and what to type."),
    "sessions": ("toolhost.cli.sessions:app", "Look into a host that runs, and end what is over."),
    "cluster": ("toolhost.cli.cluster:app", "Start Ray on machines of your own, and look at the cluster."),
    "corpus": ("toolhost.cli.corpus:app", "Index folders that the browser searches without a key."),
    "tokens": ("toolhost.cli.tokens:app", "Make access tokens for a host that others can reach."),
}

EPILOG = """Typical use:  toolhost setup  →  toolhost serve --listen 0.0.0.0:8000 --tokens-file FILE  →
vllm serve openai/gpt-oss-20b --tool-server HOST:8000/python,HOST:8000/browser"""


class LazyGroup(typer.core.TyperGroup):
    """Lists commands from the table, and imports the one that is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        place, help_line = COMMANDS[cmd_name]
        if ctx.resilient_parsing or cmd_name not in sys.argv[1:]:
            return typer.core.TyperCommand(cmd_name, help=help_line)  # only its line is shown
        module, _, attribute = place.partition(":")
        return _command(cmd_name, getattr(importlib.import_module(module), attribute))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # while the command's modules load, or in one that does not catch it itself
            typer.echo("toolhost: interrupted", err=True)
            raise typer.Exit(130) from None


def _command(name: str, found: Any) -> Any:
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_command(found)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(found)
        command = typer.main.get_command(single)
    command.name = name
    return command


def _version(value: bool) -> None:
    if value:
        from toolhost import __version__

        typer.echo(f"toolhost {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None, epilog=EPILOG, name="toolhost"
)


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """An MCP tool host whose Python remembers: sandboxed tools for vLLM, SGLang and any MCP client."""


def main() -> None:
    """The console script."""
    app()
