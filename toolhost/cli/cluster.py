"""`toolhost cluster`: Ray nodes that one starts by hand, for `backend = "ray"`; and a look at any cluster of it.

Above: the command table. Below: `cluster_node` (this machine), `cluster_nodes` (the cluster).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from collections.abc import Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from sandboxes.backends.ray_names import RESOURCE, NodeInfo
from sandboxes.backends.ray_wire import NotAdmitted
from sandboxes.errors import EngineUnavailable, SandboxError
from sandboxes.owner import Owner
from toolhost import interrupts
from toolhost.backends import ray_address, sessions_that_fit
from toolhost.cli import cluster_node as here
from toolhost.cli.shown import NOTHING, USAGE, confirm, fail, rows, safe, terminal
from toolhost.config import Settings, load, split_address
from toolhost.errors import ConfigurationError

UNREACHABLE, REFUSED, INTERRUPTED = 3, 4, 130
HEAD_PORT = 6379
COLUMNS = ("NODE", "STATE", "SESSIONS", "CAPACITY", "RAY", "PYTHON", "TOOLHOST", "ID")
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
StateDir = Annotated[str | None, typer.Option("--state-dir", metavar="DIR", help="As for `toolhost serve`.")]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="Ray's token, the same on every machine. Default: in state_dir."),
]
T = TypeVar("T")

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
    redis_password_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --redis: its password. Ray shows it to this machine's users."),
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
    each needs a node beside it. The head makes two secrets, Ray's token and the owner; the other machines need copies
    of both files.
    """
    settings = _settings(config, state_dir, token_file)
    if head == (address is not None):
        fail("give either --head, on one machine, or --address HEAD:PORT, on the others", USAGE)
    if not head and (redis is not None or port != HEAD_PORT):
        fail("--redis and --port are the head's; here --address says where it is", USAGE)
    if redis_password_file is not None and redis is None:
        fail("--redis-password-file is for --redis", USAGE)
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
        token_file=settings.ray.token_file or settings.state_dir / "cluster" / "token",
        resources={RESOURCE: amount} if amount else {},
        node_address=node_address,
        redis=redis,
        redis_password=_secret(redis_password_file),
    )
    with _saying():
        record.directory.mkdir(parents=True, exist_ok=True)
        known = record.load()
        if known is not None and known.process.alive():
            what = "the head" if known.head else "a node"
            fail(f"this machine is {what} of {known.address} already; toolhost cluster down ends that first", NOTHING)
        here.token(wanted.token_file, make=head)
        owner = _owner_file(settings, make=head)
        node = here.start(wanted, record)
    _tell(node, owner)


def _secret(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"the password in {file} cannot be read: {error}", USAGE)


def _owner_file(settings: Settings, *, make: bool) -> Path:
    """What nodes and tool hosts know each other by. Made with the head. Raises NodeProblem."""
    file = settings.ray.owner_file or settings.state_dir / "owner"
    if make and settings.ray.owner_file is None:
        Owner.load(settings.state_dir)
    if not file.exists():
        raise here.NodeProblem(f"there is no owner in {file}: copy the head's there, mode 0600")
    return file


def _tell(node: here.Node, owner: Path) -> None:
    what = "the head is up" if node.head else "this machine has joined"
    typer.echo(f"{what}: {node.address}, {node.sessions} sessions may run here")
    if node.head:
        typer.echo(
            f"\nOn every other machine, with a copy of {node.token_file} and of {owner}:\n"
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


# --- the cluster -----------------------------------------------------------------------------------------------------


@app.command("status", epilog=EPILOG)
def status(
    as_json: AsJson = False, token_file: TokenFile = None, state_dir: StateDir = None, config: Config = None
) -> None:
    """Show the head, the nodes that take sessions, how many run and may run, versions, and what is wrong.

    From any machine of the cluster. Columns in a pipe: node, state, sessions, capacity, Ray, Python, toolhost, id.
    """
    from toolhost.cli import cluster_nodes

    settings = _settings(config, state_dir, token_file)
    view = _ask(settings, cluster_nodes.look(settings, _head(settings)))
    wrong = view.wrong()
    if as_json:
        nodes = [asdict(node) for node in view.nodes]
        shown = {"head": view.head, "sessions": view.sessions, "capacity": view.capacity, "nodes": nodes}
        typer.echo(json.dumps({**shown, "versions": dict(view.versions), "wrong": wrong}, indent=2))
    else:
        if terminal():
            token = settings.ray.token_file or settings.state_dir / "cluster" / "token"
            typer.echo(f"head {view.head}; {view.sessions} sessions, {view.capacity} may run; token in {token}")
        rows(COLUMNS, [_row(node) for node in view.nodes])
        for line in wrong:
            typer.echo(f"toolhost: {safe(line)}", err=True)
    raise typer.Exit(NOTHING if wrong else 0)


@app.command("drain", epilog=EPILOG)
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its address or id, as `status` shows them.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when its last session has ended.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="It takes new sessions again.")] = False,
    token_file: TokenFile = None,
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Give a node no new sessions. Those that it has stay until they end; it is remembered over restarts."""
    from toolhost.cli import cluster_nodes

    if wait and undo:
        fail("--wait is for draining, not for --undo", USAGE)
    settings = _settings(config, state_dir, token_file)
    found = _ask(settings, cluster_nodes.drain(settings, node, draining=not undo))
    if undo:
        typer.echo(f"{found.host} takes new sessions again")
        return
    typer.echo(f"{found.host} takes no new sessions; it has {found.sandboxes}")
    if wait:
        _ask(settings, cluster_nodes.emptied(settings, node, lambda left: typer.echo(f"{left} left")))
        typer.echo(f"{found.host} is empty: toolhost cluster down on it, if it is to be taken away")


def _row(node: NodeInfo) -> tuple[object, ...]:
    state = "problem" if node.problem else "draining" if node.draining else "up"
    known = node.versions
    versions = (known.get(name) or None for name in ("ray", "python", "toolhost"))
    return (node.host, state, node.sandboxes, node.capacity, *versions, node.node.rpartition("/")[2])


def _head(settings: Settings) -> str:
    head = ray_address(settings)
    if head == "auto":
        fail(
            "this machine is in no cluster that is known here: toolhost cluster up, or ray.address in the settings",
            USAGE,
        )
    return head


def _ask(settings: Settings, work: Coroutine[Any, Any, T]) -> T:
    """Runs what asks the cluster; what goes wrong becomes one line and an exit code."""
    _need_ray()
    head = _head(settings)
    logging.getLogger("sandboxes").addHandler(logging.NullHandler())  # what goes wrong is said once, here
    with _saying():
        try:
            here.reach(head)
            return interrupts.run(work)
        except EngineUnavailable as error:
            fail(error.message, REFUSED if isinstance(error, NotAdmitted) else UNREACHABLE)
        except SandboxError as error:
            fail(error.message, NOTHING)
        except ConfigurationError as error:
            fail(error.message, USAGE)
        finally:
            work.close()


# --- inside ----------------------------------------------------------------------------------------------------------


def _settings(config: Path | None, state_dir: str | None, token_file: Path | None = None) -> Settings:
    flags = {"state_dir": state_dir, "ray": {"token_file": token_file}, "sandbox": {"backend": "ray"}}
    try:
        return load(config, flags)
    except ConfigurationError as error:
        fail(error.message, USAGE)


def _need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        fail("Ray is not installed here: pip install 'toolhost[ray]'", USAGE)


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
