"""What several commands check of their options: what is wrong with one is a line, and exit code 2.

Above: the commands. Below: `identity`. It is apart from `serve` so that a command that only talks to a server does not
wait for the whole host to load.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import typer

from toolhost.identity import SESSION_ID

CANNOT_START = 2


def fail(message: str) -> NoReturn:
    """One line on stderr that says what is wrong and what to type; exit code 2."""
    typer.echo(f"toolhost: {message}", err=True)
    raise typer.Exit(CANNOT_START)


def session_id(text: str) -> None:
    """Refuse a --session that a tool host would not take."""
    if not SESSION_ID.fullmatch(text):
        fail("--session takes 1 to 128 characters of A-Z a-z 0-9 . _ : -")


def utf8(text: str, what: str) -> None:
    """Refuse text that came as bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        fail(f"{what} cannot be used: not UTF-8 text")


def secret(file: Path, what: str) -> str:
    """The secret in a file, which goes into a header; `what` names its kind."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        fail(f"cannot read the {what} in {file}: {error.strerror or error}")
    except UnicodeDecodeError:
        text = ""
    if not text.isascii() or not text.isprintable() or not text:
        fail(f"{file} must hold a {what} and nothing else")
    return text
