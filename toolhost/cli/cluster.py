"""`toolhost cluster`: Ray nodes that one starts by hand, for `backend = "ray"`; and a look at any cluster of it.

Above: the command table. Below: `cluster_node` (this machine), `cluster_nodes` (the cluster).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from toolhost.backends import sessions_that_fit
from toolhost.cli import cluster_node as here
from toolhost.cli.shown import NOTHING, USAGE, confirm, fail
from toolhost.config import Settings, load, split_address
from toolhost.errors import ConfigurationError

UNREACHABLE, REFUSED, INTERRUPTED = 3, 4, 130
HEAD_PORT = 6379
RESOURCE = "toolhost_session"
EPILOG = """Exit codes: 0 done; 1 nothing to do, not confirmed, or something is wrong (status); 2 wrong usage or
settings; 3 no head is reached; 4 the head refused (token, versions); 130 interrupted, and what was begun is undone."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    epilog=EPILOG,
    rich_markup_mode=None,
    help="Start Ray on machines of your own, for sessions on many machines, and look at them (docs/cluster.md).",
)

Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")]
StateDir = Annotated[Path | None, typer.Option("--state-dir", metavar="DIR", help="As for `toolhost serve`.")]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="Ray's token, the same on every machine. Default: in state_dir."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.callback()
def _group() -> None:
    """Start Ray on machines of your own, for sessions on many machines, and look at them (docs/cluster.md)."""


# --- this machine ----------------------------------------------------------------------------------------------------


@app.command("up", epilog=EPILOG)
def up(
    head: Annotated[bool, typer.Option("--head", help="Be the cluster's head.")] = False,
    address: Annotated[
        str | None, typer.Option("--address", metavar="HEAD:PORT", help="Join the cluster of this head.")
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Sessions that this machine takes. Default: what its memory holds."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --head: its port.")] = HEAD_PORT,
    redis: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --head: where it keeps its tables, so that it may be restarted."),
    ] = None,
    node_address: Annotated[
        str | None, typer.Option(metavar="IP", help="This machine's address, as the others reach it.")
    ] = None,
    token_file: TokenFile = None,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Start Ray on this machine, as the head or as a node of one, and return when it has joined.

    It runs until `toolhost cluster down` or the machine's end. --sessions 0 is for a machine that only runs tool hosts:
    each needs a node beside it. The head makes the token; the other machines need a copy of its file.
    """
    settings = _settings(config, state_dir)
    if head == (address is not None):
        fail("give either --head, on one machine, or --address HEAD:PORT, on the others", USAGE)
    if not head and (redis is not None or port != HEAD_PORT):
        fail("--redis and --port are the head's; here --address says where it is", USAGE)
    for given in filter(None, (address, redis)):
        try:
            split_address(given)
        except ValueError as error:
            fail(str(error), USAGE)
    _need_ray()
    record = here.NodeRecord(settings.state_dir)
    amount = sessions_that_fit(settings.sandbox.memory_bytes) if sessions is None else sessions
    wanted = here.Wanted(
        address=address,
        port=port,
        sessions=amount,
        token_file=_token_file(settings, token_file),
        resources={RESOURCE: amount} if amount else {},
        node_address=node_address,
        redis=redis,
    )
    with _saying():
        record.directory.mkdir(parents=True, exist_ok=True)
        known = record.load()
        if known is not None and known.process.alive():
            what = "the head" if known.head else "a node"
            fail(f"this machine is {what} of {known.address} already; toolhost cluster down ends that first", NOTHING)
        here.token(wanted.token_file, make=head)
        node = here.start(wanted, record)
    _tell(node, settings)


def _tell(node: here.Node, settings: Settings) -> None:
    what = "the head is up" if node.head else "this machine has joined"
    typer.echo(f"{what}: {node.address}, {node.sessions} sessions may run here")
    if node.head:
        typer.echo(
            f"\nOn every other machine, with a copy of {node.token_file} and of {settings.state_dir / 'owner'}:\n"
            f"  toolhost cluster up --address {node.address}"
        )
    typer.echo("\nLook at it:  toolhost cluster status\nEnd it:      toolhost cluster down")


@app.command("down", epilog=EPILOG)
def down(state_dir: StateDir = None, config: Config = None, yes: Yes = False) -> None:
    """End what `toolhost cluster up` started on this machine, and nothing else of Ray.

    Sessions of this machine lose their variables and files. To keep calls from failing, drain it first and wait:
    `toolhost cluster drain NODE --wait`. A head takes the cluster with it, unless it has --redis and comes back.
    """
    settings = _settings(config, state_dir)
    record = here.NodeRecord(settings.state_dir)
    with _saying():
        node = record.load()
        if node is None:
            fail("nothing is up here that `toolhost cluster up` started", NOTHING)
        if node.process.alive():
            what = "the head, and with it the cluster" if node.head else "this machine's node and its sessions"
            confirm(f"End {what} ({node.address})?", [], yes)
        ended = here.stop(node)
        record.remove()
    typer.echo("ended" if ended else "it had ended before; its record is removed")


# --- inside ----------------------------------------------------------------------------------------------------------


def _settings(config: Path | None, state_dir: Path | None) -> Settings:
    try:
        return load(config, {"state_dir": state_dir})
    except ConfigurationError as error:
        fail(error.message, USAGE)


def _need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        fail("Ray is not installed here: pip install 'toolhost[ray]'", USAGE)


def _token_file(settings: Settings, given: Path | None) -> Path:
    return given or settings.state_dir / "cluster" / "token"


@contextlib.contextmanager
def _saying() -> Iterator[None]:
    """What goes wrong becomes one line and an exit code."""
    try:
        yield
    except here.HeadUnreachable as error:
        fail(error.message, UNREACHABLE)
    except (here.TokenRefused, here.VersionsDiffer) as error:
        fail(error.message, REFUSED)
    except here.NodeProblem as error:
        fail(error.message, USAGE)
    except OSError as error:
        fail(f"{error.filename or 'this machine'}: {error.strerror or error}", USAGE)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
