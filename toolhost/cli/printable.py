"""Text from elsewhere on a terminal."""

from __future__ import annotations

import sys
from unicodedata import category

import typer


def printable(text: str) -> str:
    """Text of a model, a tool or a page without the characters by which it could drive a terminal, or show in another
    order than it has (U+202E and its kin). Spaces of every kind stay."""
    return "".join(char for char in text if char in "\n\t" or char.isprintable() or category(char) == "Zs")


def echo(text: str) -> None:
    """Text from elsewhere on standard output: as it is for a program, `printable` on a terminal, which then says so."""
    shown = printable(text) if sys.stdout.isatty() else text
    typer.echo(shown)
    if left_out := len(text) - len(shown):
        typer.echo(f"toolhost: {left_out} characters that would command the terminal are not shown", err=True)
