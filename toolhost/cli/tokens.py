"""`toolhost tokens`: access tokens for a host that others can reach.

Above: the command table. Below: `auth`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from toolhost.auth import Scope, mint
from toolhost.cli.checks import fail

app = typer.Typer(
    help="Make access tokens for a host that others can reach.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    """Make access tokens for a host that others can reach."""


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Who will use it: its sessions belong to this name.")],
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="Tokens file to add it to.")],
    admin: Annotated[bool, typer.Option("--admin", help="May also list, read and close everybody's sessions.")] = False,
    also: Annotated[
        bool, typer.Option("--also", help="The name has a token already: both are good, for the same sessions.")
    ] = False,
) -> None:
    """Make a token, add its digest to the file, and print the token once.

    To replace a token make another with --also, hand it out, and delete the older line of that name from the file.
    """
    try:
        token, line = mint(name, [Scope.USE, Scope.ADMIN] if admin else [Scope.USE])
        if not also and name in _names(file):
            fail(f"{file} has a token for {name} already; give --also for a second one, or delete its line first")
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(f"{line}\n")
    except UnicodeDecodeError:
        fail(f"{file} is not a tokens file: it is not text")
    except ValueError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write tokens file {file}: {error.strerror or error}")
    typer.echo(token)
    typer.echo(f"Added to {file}; a running host takes it at once. It is not shown again.", err=True)
    typer.echo(f"In vLLM's flag:  --tool-server user:{token[:6]}…@HOST:8000/python", err=True)


def _names(file: Path) -> set[str]:
    """Whose tokens the file has; a file that is not there has none."""
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return set()
    return {line.partition(":")[0].strip() for line in lines if not line.lstrip().startswith("#")}
