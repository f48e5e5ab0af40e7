"""`toolhost corpus`: folders that the browser searches without key or network.

Above: the command table. Below: `config` for where the index is, `search.corpus`, `browsing.sections`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from toolhost.browsing.sections import FileConverter
from toolhost.cli.checks import fail, utf8
from toolhost.cli.printable import echo
from toolhost.cli.shown import safe
from toolhost.config import load
from toolhost.errors import ConfigurationError
from toolhost.search.corpus import AddReport, Corpus, CorpusError

SHOWN_SKIPPED = 10

Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")]
StateDir = Annotated[str | None, typer.Option("--state-dir", metavar="DIR", help="Where the index is kept.")]

app = typer.Typer(
    help="Folders that the browser searches without key or network.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    """Folders that the browser searches without key or network."""


@contextmanager
def _opened(config: Path | None, state_dir: str | None) -> Iterator[Corpus]:
    """The index of this host; what goes wrong with it becomes one line and exit code 2."""
    try:
        settings = load(config, {"state_dir": state_dir})
    except ConfigurationError as error:
        fail(error.message)
    try:
        corpus = Corpus(settings.corpus_file, FileConverter())
    except CorpusError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot open the index {settings.corpus_file}: {error.strerror or error}")
    try:
        yield corpus
    except CorpusError as error:
        fail(str(error))
    except sqlite3.Error as error:
        fail(f"the index cannot be used: {error}")
    finally:
        corpus.close()


@app.command("add")
def add(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder, or a file: HTML, Markdown, text, PDF.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the collection; the folder's by default.")] = None,
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Index a folder, or bring its index up to date."""
    with _opened(config, state_dir) as corpus:
        _report(_add_with_progress(corpus, path, name))


def _add_with_progress(corpus: Corpus, path: Path, name: str | None) -> AddReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("indexing", total=None)
        return corpus.add(path, name, lambda done, total, _: bar.update(task, completed=done, total=total))


def _report(report: AddReport) -> None:
    typer.echo(
        f"{report.name}: {report.added} indexed, {report.unchanged} unchanged, {report.removed} removed, "
        f"{len(report.skipped)} without text"
    )
    for path, reason in report.skipped[:SHOWN_SKIPPED]:
        typer.echo(f"  left out {safe(path)}: {safe(reason)}", err=True)
    if len(report.skipped) > SHOWN_SKIPPED:
        typer.echo(f"  and {len(report.skipped) - SHOWN_SKIPPED} more", err=True)


@app.command("list")
def list_(config: Config = None, state_dir: StateDir = None) -> None:
    """Show what is indexed."""
    with _opened(config, state_dir) as corpus:
        collections = corpus.collections()
        for collection in collections:
            echo(f"{collection.name}\t{collection.documents}\t{collection.path}")
        if not collections:
            typer.echo("Nothing is indexed. Add a folder: toolhost corpus add PATH", err=True)


@app.command("search")
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Words to find.")],
    number: Annotated[int, typer.Option("-n", min=1, max=100, help="How many hits.")] = 10,
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Search as the browser does."""
    utf8(query, "the query")
    with _opened(config, state_dir) as corpus:
        hits = corpus.search(query, number)
        for hit in hits:
            echo(f"{hit.title}\n  {hit.url} (line {hit.line})\n  {hit.snippet}")
        if not hits:
            typer.echo("Nothing found.", err=True)


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The collection, as `toolhost corpus list` names it.")],
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Forget a collection; its files stay."""
    utf8(name, "the name")
    with _opened(config, state_dir) as corpus:
        typer.echo(f"{name}: {corpus.remove(name)} documents forgotten")
