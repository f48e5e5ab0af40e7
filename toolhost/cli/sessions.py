"""`toolhost sessions`: look into a host that runs, and end what is over.

Above: the command table. Below: `admin_client`, `cli.shown`, `cli.prune`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import typer
from rich.live import Live

from toolhost.admin_client import AdminClient, HostRefused, HostUnreachable
from toolhost.cli.prune import prune
from toolhost.cli.shown import NOTHING, USAGE, confirm, duration, fail, moment, rows, safe, size, span, table, terminal
from toolhost.config import load
from toolhost.errors import ConfigurationError

UNREACHABLE, REFUSED, INTERRUPTED = 3, 4, 130
EPILOG = """Exit codes: 0 done; 1 no such session, nothing to do, or not confirmed; 2 wrong usage or settings;
3 no host is reached; 4 the host refused (token, scope, state); 130 interrupted.

On a terminal there are tables; in a pipe one line a row, values between tabs, sizes in bytes, durations in seconds.

A token comes from --token-file, TOOLHOST_CLIENT__TOKEN_FILE or TOOLHOST_CLIENT__TOKEN. The host is the one of --url,
TOOLHOST_CLIENT__URL, or the `server.listen` of the settings."""

app = typer.Typer(
    no_args_is_help=True, add_completion=False, epilog=EPILOG, rich_markup_mode=None, help="Look into a host that runs."
)
files = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="A session's files.")
app.add_typer(files, name="files")
app.command("prune")(prune)

Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="Where the host is.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help="A file with an admin token.")]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")]
Name = Annotated[
    str, typer.Argument(metavar="SESSION", help="As the list shows it, or the first digits of its digest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

COLUMNS = ("SESSION", "STATE", "ATTACHED", "CALLS", "CPU", "MEMORY", "IDLE", "AGE", "LAST CALL")


@app.callback()
def _group() -> None:
    """Look into a host that runs, and end what is over."""


# --- looking ---------------------------------------------------------------------------------------------------------


@app.command("list", epilog=EPILOG)
def list_sessions(
    principal: Annotated[str | None, typer.Option(metavar="NAME", help="Only this principal's.")] = None,
    state: Annotated[str | None, typer.Option(metavar="STATE,…", help="Only idle, running, lost, new, …")] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Only request, retained or connection.")] = None,
    idle: Annotated[str | None, typer.Option(metavar="TIME", help="Only idle for at least this (10m, 2h).")] = None,
    closed: Annotated[bool, typer.Option("--closed", help="Closed ones too, as long as they are on record.")] = False,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="At most so many.")] = 1000,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on showing them, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="With --watch: how often.")] = 2.0,
    as_json: AsJson = False,
    url: Url = None,
    token_file: TokenFile = None,
    config: Config = None,
) -> None:
    """List sessions, newest use first.

    Columns in a pipe: session, digest, state, attached, calls, cpu seconds, memory bytes, idle seconds, age seconds,
    last call's ending, its seconds; on a cluster, where all tool hosts' sessions are listed, also the node.
    """
    filters: dict[str, Any] = {"principal": principal, "phase": state, "kind": kind, "closed": closed, "limit": limit}
    filters["idle_s"] = None if idle is None else duration(idle)
    with talking(url, token_file, config) as host:
        if not watch:
            _show_list(host.sessions(**filters), as_json)
        elif as_json:
            while True:
                typer.echo(json.dumps(host.sessions(**filters)))
                time.sleep(every)
        elif not terminal():
            fail("--watch needs a terminal; in a pipe use --watch --json, one array a line", USAGE)
        else:
            _watch(host, filters, every)


def _show_list(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif terminal():
        rows(*_with_nodes(found, COLUMNS, [_row(session, _cpu_time(session)) for session in found]))
        if not found:
            typer.echo("no sessions")
    else:
        rows(*_with_nodes(found, (), [_plain(session) for session in found]))


def _watch(host: AdminClient, filters: dict[str, Any], every: float) -> None:
    earlier: dict[str, tuple[float, float]] = {}
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            found, now = host.sessions(**filters), time.monotonic()
            shown = [_row(one, _cpu_share(one, earlier, now)) for one in found]
            live.update(table(*_with_nodes(found, COLUMNS, shown)), refresh=True)
            earlier = {one["session"]: (used, now) for one in found if (used := _usage(one, "cpu_s")) is not None}
            time.sleep(every)


def _with_nodes(
    found: list[dict[str, Any]], columns: tuple[str, ...], shown: list[tuple[object, ...]]
) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """The same with a column for nodes, where there are any."""
    nodes = [(one["sandbox"] or {}).get("node") or None for one in found]
    if not any(nodes):
        return columns, shown
    return columns and (*columns, "NODE"), [(*row, node) for row, node in zip(shown, nodes, strict=True)]


def _row(one: dict[str, Any], cpu: str | None) -> tuple[object, ...]:
    last = one["last_call"]
    ending = None
    if last is not None:
        ending = last["receipt"]["ending"] if last["receipt"] else "running"
        if last["duration_s"] is not None:
            ending = f"{ending}, {span(last['duration_s'])}"
    state = f"{one['phase']} ({one['close_reason']})" if one["phase"] == "closed" else one["phase"]
    memory = size(_usage(one, "memory_bytes"))
    idle = None if one["running"] else span(one["idle_s"])
    return (one["name"], state, one["attached"], one["calls"], cpu, memory, idle, span(one["age_s"]), ending)


def _plain(one: dict[str, Any]) -> tuple[object, ...]:
    last = one["last_call"] or {}
    return (
        *(one["name"], one["session"], one["phase"], one["attached"], one["calls"]),
        *(_usage(one, "cpu_s"), _usage(one, "memory_bytes"), one["idle_s"], one["age_s"]),
        *((last.get("receipt") or {}).get("ending"), last.get("duration_s")),
    )


def _usage(one: dict[str, Any], name: str) -> Any:
    return (one["usage"] or {}).get(name)


def _cpu_time(one: dict[str, Any]) -> str | None:
    used = _usage(one, "cpu_s")
    return None if used is None else f"{used:.1f} s"


def _cpu_share(one: dict[str, Any], earlier: dict[str, tuple[float, float]], now: float) -> str | None:
    used = _usage(one, "cpu_s")
    if used is None or one["session"] not in earlier:
        return None
    before, then = earlier[one["session"]]
    return f"{max(0.0, used - before) / max(now - then, 1e-3) * 100:.0f} %"


@app.command("show", epilog=EPILOG)
def show(
    session: Name, as_json: AsJson = False, url: Url = None, token_file: TokenFile = None, config: Config = None
) -> None:
    """Show one session, also the last closed one of its name."""
    with talking(url, token_file, config) as host:
        found = host.show(host.digest(session))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    usage, sandbox = found["usage"] or {}, found["sandbox"] or {}
    lines = (
        ("session", found["name"]),
        ("digest", found["session"]),
        ("state", found["phase"]),
        ("retention", found["retention"]),
        ("attached", found["attached"]),
        ("running", found["running"]),
        ("waiting calls", found["waiting"]),
        ("calls", found["calls"]),
        ("epoch, sequence", f"{found['epoch']}, {found['sequence']}"),
        ("created", moment(found["created_at"])),
        ("last used", moment(found["last_used_at"])),
        ("time to live", span(found["ttl_s"])),
        ("sandbox", f"{sandbox['backend']} {sandbox['name']}" if sandbox else None),
        ("memory", size(usage.get("memory_bytes"))),
        ("cpu", _cpu_time(found)),
        ("processes", usage.get("processes")),
        ("out of memory", usage.get("oom_kills")),
        ("lost", found["lost_reason"]),
        ("closed", moment(found["closed_at"])),
        ("closed because", found["close_reason"]),
    )
    for name, value in lines:
        if value is not None:
            typer.echo(f"{name:16} {safe(value)}" if terminal() else f"{name}\t{safe(value)}")


@app.command("logs", epilog=EPILOG)
def logs(
    session: Name,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, max=10_000, help="The newest so many.")
    ] = 50,
    as_json: AsJson = False,
    url: Url = None,
    token_file: TokenFile = None,
    config: Config = None,
) -> None:
    """A session's receipts, oldest first: what ran, how it ended, what became of the variables. Never code or output.

    Columns in a pipe: attempt, queued (seconds since 1970), epoch, sequence, ending, state, seconds, bytes out, cause.
    """
    with talking(url, token_file, config) as host:
        found = list(reversed(host.attempts(host.digest(session), limit)))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    header = ("ATTEMPT", "QUEUED", "EPOCH", "SEQUENCE", "ENDING", "STATE", "TIME", "OUTPUT", "CAUSE")
    rows(header, [_receipt_row(attempt) for attempt in found])


def _receipt_row(attempt: dict[str, Any]) -> tuple[object, ...]:
    receipt, people = attempt["receipt"], terminal()
    if receipt is None:
        queued = moment(attempt["registered_at"]) if people else attempt["registered_at"]
        return (attempt["attempt_id"], queued, None, None, "running", None, None, None, None)
    cause, took = receipt["cause"] or {}, attempt["duration_s"]
    return (
        attempt["attempt_id"],
        moment(receipt["queued_at"]) if people else receipt["queued_at"],
        receipt["epoch"],
        receipt["sequence"],
        receipt["ending"],
        receipt["state"],
        span(took) if people else took,
        size(receipt["bytes_out"]) if people else receipt["bytes_out"],
        cause.get("kind"),
    )


# --- making and ending -----------------------------------------------------------------------------------------------


@app.command("new", epilog=EPILOG)
def new(
    principal: Annotated[
        str | None, typer.Option(metavar="NAME", help="For whom; default: the token's own name.")
    ] = None,
    ttl: Annotated[str | None, typer.Option(metavar="TIME", help="Ends after so much idle time (10m, 2h).")] = None,
    as_json: AsJson = False,
    url: Url = None,
    token_file: TokenFile = None,
    config: Config = None,
) -> None:
    """Mint the key of a retained session and print it. Whoever has it has the session: keep it like a password."""
    ttl_s = None if ttl is None else duration(ttl)
    with talking(url, token_file, config) as host:
        found = host.mint(principal, ttl_s)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(found["key"])
    if terminal():
        typer.echo(
            f"Send it as x-toolhost-session, with {found['principal']}'s token; it is not shown again.", err=True
        )


@app.command("close", epilog=EPILOG)
def close(
    session: Annotated[list[str] | None, typer.Argument(metavar="[SESSION]…", help="As the list shows them.")] = None,
    idle: Annotated[str | None, typer.Option(metavar="TIME", help="All that are idle for at least this.")] = None,
    principal: Annotated[str | None, typer.Option(metavar="NAME", help="All of this principal's.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All there are.")] = False,
    yes: Yes = False,
    url: Url = None,
    token_file: TokenFile = None,
    config: Config = None,
) -> None:
    """End sessions with their variables and files: named ones, or all that match. Prints what was closed."""
    filters = {"idle_s": None if idle is None else duration(idle), "principal": principal, "all": every}
    if bool(session) == any(filters.values()):
        fail("name sessions, or say which with --idle, --principal or --all", USAGE)
    with talking(url, token_file, config) as host:
        if session:
            digests = [(name, host.digest(name)) for name in session]  # a wrong name closes nothing
            ended = [name for name, digest in digests if host.close(digest)]
        else:
            found = host.close_many(dry_run=True, **filters)
            if found:
                confirm(
                    f"Close {len(found)} sessions, with their variables and files?", [one["name"] for one in found], yes
                )
            ended = [one["name"] for one in host.close_many(dry_run=False, **filters)] if found else []
    for name in ended:
        typer.echo(safe(name))
    if not ended:
        fail("nothing was open that matches", NOTHING)


@app.command("interrupt", epilog=EPILOG)
def interrupt(session: Name, url: Url = None, token_file: TokenFile = None, config: Config = None) -> None:
    """End what runs in a session now; its variables stay where the code lets itself be interrupted."""
    with talking(url, token_file, config) as host:
        if not host.interrupt(host.digest(session)):
            fail("nothing runs in it", NOTHING)


@app.command("restart", epilog=EPILOG)
def restart(
    session: Name, yes: Yes = False, url: Url = None, token_file: TokenFile = None, config: Config = None
) -> None:
    """Give a session a fresh interpreter: variables go, files stay. Prints the new epoch."""
    with talking(url, token_file, config) as host:
        digest = host.digest(session)
        confirm("Restart the interpreter? Its variables are lost.", [session], yes)
        typer.echo(host.restart(digest))


# --- files -----------------------------------------------------------------------------------------------------------


@files.command("list", epilog=EPILOG)
def files_list(
    session: Name,
    path: Annotated[str, typer.Argument(help="A directory.")] = "",
    as_json: AsJson = False,
    url: Url = None,
    token_file: TokenFile = None,
    config: Config = None,
) -> None:
    """List a session's files. Columns in a pipe: path, kind, bytes, modified (seconds since 1970)."""
    with talking(url, token_file, config) as host:
        found, complete = host.files(host.digest(session), path)
    if not complete:
        typer.echo(f"Only the first {len(found)} entries are listed: there are more. Name a directory.", err=True)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif terminal():
        shown = [(one["path"], one["kind"], size(one["size"]), moment(one["modified"])) for one in found]
        rows(("PATH", "KIND", "SIZE", "MODIFIED"), shown)
    else:
        rows((), [(one["path"], one["kind"], one["size"], one["modified"]) for one in found])


@files.command("get", epilog=EPILOG)
def files_get(
    session: Name,
    path: Annotated[str, typer.Argument(help="The file, or with --tar the directory.")],
    into: Annotated[str | None, typer.Argument(metavar="[INTO]", help="Where to; - is standard output.")] = None,
    tar: Annotated[bool, typer.Option("--tar", help="The directory, as a tar archive.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    url: Url = None,
    token_file: TokenFile = None,
    config: Config = None,
) -> None:
    """Copy a file out of a session, or with --tar a directory."""
    name = path.rstrip("/").rpartition("/")[2] or "data"
    place = into or (f"{name}.tar" if tar else name)
    with talking(url, token_file, config) as host:
        digest = host.digest(session)
        if place == "-":
            host.get_file(digest, path, cast("BinaryIO", sys.stdout.buffer), archive=tar)
            return
        with _written(Path(place), force) as file:
            host.get_file(digest, path, file, archive=tar)


@contextlib.contextmanager
def _written(place: Path, force: bool) -> Iterator[BinaryIO]:
    """A file that is there when all of it has come, and not before."""
    if place.exists() and not force:
        fail(f"{place} is there already; give another name, or --force", USAGE)
    aside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with aside.open("xb") as file:
            yield file
        aside.replace(place)
    except OSError as error:
        fail(f"cannot write {place}: {error.strerror or error}", USAGE)
    finally:
        aside.unlink(missing_ok=True)


@files.command("put", epilog=EPILOG)
def files_put(
    session: Name,
    source: Annotated[Path, typer.Argument(help="The file to copy.")],
    path: Annotated[str | None, typer.Argument(metavar="[PATH]", help="Its name there; default: its own.")] = None,
    url: Url = None,
    token_file: TokenFile = None,
    config: Config = None,
) -> None:
    """Copy a file into a session."""
    try:
        with source.open("rb") as content, talking(url, token_file, config) as host:
            host.put_file(host.digest(session), path or source.name, content, os.fstat(content.fileno()).st_size)
    except OSError as error:
        fail(f"cannot read {source}: {error.strerror or error}", USAGE)


# --- what they share -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def talking(url: str | None, token_file: Path | None, config: Path | None) -> Iterator[AdminClient]:
    """The host to ask; what goes wrong becomes one line and an exit code."""
    try:
        yield AdminClient.of(load(config, {"client": {"url": url, "token_file": token_file}}))
    except ConfigurationError as error:
        fail(error.message, USAGE)
    except HostUnreachable as error:
        fail(error.message, UNREACHABLE)
    except HostRefused as error:
        fail(error.message, {404: NOTHING, 400: USAGE}.get(error.status, REFUSED))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
