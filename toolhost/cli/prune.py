"""`toolhost sessions prune`: removes what a dead host left, without a host.

Above: `cli.sessions`. Below: `config`, `services`' parts, sandboxes' public API.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sandboxes.backends.base import Backend
from sandboxes.errors import SandboxError, StoreUnavailable
from sandboxes.orphans import Left, Verdict, remove, survey
from sandboxes.owner import Owner
from sandboxes.stores.base import SharedStore, Store
from toolhost import interrupts
from toolhost.backends import create_backend, create_store, manager_settings, owner_of
from toolhost.cli.shown import USAGE, confirm, fail, rows, span, terminal
from toolhost.config import Settings, load
from toolhost.errors import ConfigurationError
from toolhost.identity import label
from toolhost.services import StateDirectoryTaken, only_host

FAILED, RUNS, INTERRUPTED = 1, 4, 130
BACKENDS = ("bubblewrap", "docker")
COLUMNS = ("SANDBOX OR FILES", "BACKEND", "AGE", "VERDICT", "SESSION", "WHY")


def prune(
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")] = None,
    state_dir: Annotated[str | None, typer.Option(metavar="DIR", help="The dead host's; as for serve.")] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this one; default: each that has state there.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what the next start of the host would take up. Asks first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what there is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Remove the sandboxes and files that a dead host left and that no start of it would take up.

    Needs no host, no environment and no image: it reads the engine, the owner files and the ledger of the state
    directory. While a host runs there it does nothing, since that host removes its orphans itself. Exit codes: 0 done,
    also when there was nothing; 1 not confirmed, or something could not be removed; 2 wrong settings; 4 a host runs;
    130 interrupted.
    """
    flags = {"state_dir": state_dir, "sandbox": {"backend": backend}}
    try:
        settings = load(config, flags)
        if not _owner_file(settings).exists():
            typer.echo(f"nothing to prune: no host has used {settings.state_dir}", err=True)
            return
        with only_host(settings.state_dir):
            failed = interrupts.run(_prune(settings, everything=everything, yes=yes, dry_run=dry_run, as_json=as_json))
    except StateDirectoryTaken:
        fail(
            f"a host runs on {settings.state_dir} and removes its orphans itself; end its sessions with "
            "`toolhost sessions close`, or stop it first",
            RUNS,
        )
    except ConfigurationError as error:
        fail(error.message, USAGE)
    except SandboxError as error:
        fail(error.message, FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if failed:
        raise typer.Exit(FAILED)


async def _prune(settings: Settings, *, everything: bool, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Returns how much could not be removed."""
    owner = owner_of(settings)
    failed = 0
    names = [settings.sandbox.backend] if settings.sandbox.backend != "auto" else _with_state(settings)
    async with _ledger(settings, owner) as store, AsyncExitStack() as stack:
        if isinstance(store, SharedStore) and (living := await store.replicas()):
            fail(f"{len(living)} tool hosts share this store and remove orphans themselves; stop them first", RUNS)
        found: list[tuple[Backend, Sequence[Left]]] = []
        for name in names:
            try:
                backend = await stack.enter_async_context(_opened(settings, owner, name))
                left = await survey(backend, store, owner, manager_settings(settings), time.time())
            except SandboxError as error:
                failed += 1
                typer.echo(f"toolhost: {name}: {error.message}", err=True)
            else:
                found.append((backend, left))
        _show([(backend.name, one) for backend, left in found for one in left], as_json)
        for backend, left in found:
            doomed = _chosen(left, everything=everything, yes=yes, dry_run=dry_run)
            failed += await _remove(backend, store, doomed)
    return failed


def _owner_file(settings: Settings) -> Path:
    cluster = settings.sandbox.backend == "ray"
    return (settings.ray.owner_file if cluster else None) or settings.state_dir / "owner"


def _with_state(settings: Settings) -> list[str]:
    return [name for name in BACKENDS if (settings.state_dir / name).is_dir()]


@asynccontextmanager
async def _ledger(settings: Settings, owner: Owner) -> AsyncIterator[Store | None]:
    """The ledger, or None when it cannot be read: then nothing is known to be an orphan."""
    store = create_store(settings, owner)
    try:
        await store.open()
    except StoreUnavailable as error:
        typer.echo(f"toolhost: {error.message}; without it every sandbox needs --all to be removed", err=True)
        yield None
        return
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def _opened(settings: Settings, owner: Owner, name: str) -> AsyncIterator[Backend]:
    sandbox = settings.sandbox.model_copy(update={"backend": name})
    backend = create_backend(settings.model_copy(update={"sandbox": sandbox}), owner)
    await backend.open(launching=False)
    try:
        yield backend
    finally:
        await backend.close()


def _chosen(left: Sequence[Left], *, everything: bool, yes: bool, dry_run: bool) -> list[Left]:
    orphans = [one for one in left if one.verdict is Verdict.ORPHAN]
    others = [one for one in left if one.verdict is not Verdict.ORPHAN]
    if dry_run:
        return []
    if not others:
        return orphans
    if not everything:
        typer.echo(f"{len(others)} are left alone: not orphaned. --all removes them too", err=True)
        return orphans
    question = (
        f"Remove {len(others)} sandboxes or sessions' files that are not orphaned, with their variables and files?"
    )
    confirm(question, [_session(one) or one.name for one in others], yes)
    return [*orphans, *others]


async def _remove(backend: Backend, store: Store | None, doomed: Sequence[Left]) -> int:
    kept = untold = 0
    for one in doomed:
        try:
            await remove(backend, store, one, time.time())
        except StoreUnavailable as error:
            untold += 1
            typer.echo(f"toolhost: {one.name} is removed, and its session still open: {error.message}", err=True)
        except SandboxError as error:
            kept += 1
            typer.echo(f"toolhost: {one.name} is not removed: {error.message}", err=True)
    if doomed:
        typer.echo(f"removed {len(doomed) - kept} of {len(doomed)}", err=True)
    return kept + untold


def _session(one: Left) -> str | None:
    return None if one.record is None else label(one.record.key)


def _show(left: Sequence[tuple[str, Left]], as_json: bool) -> None:
    """Each with its backend's name."""
    now = time.time()
    if as_json:
        typer.echo(json.dumps([_fields(backend, one, now) for backend, one in left], indent=2))
        return
    shown = [(one.name, backend, _age(one, now), one.verdict.value, _session(one), one.why) for backend, one in left]
    if shown or not terminal():
        rows(COLUMNS, shown)
    else:
        typer.echo("nothing is left", err=True)


def _age(one: Left, now: float) -> object:
    seconds = _age_s(one, now)
    return span(seconds) if seconds is not None and terminal() else seconds


def _age_s(one: Left, now: float) -> float | None:
    return None if one.handle is None else round(max(0.0, now - one.handle.created_at), 3)


def _fields(backend: str, one: Left, now: float) -> dict[str, Any]:
    return {
        "sandbox": None if one.handle is None else one.handle.sandbox_id,
        "workspace": one.workspace,
        "backend": backend,
        "age_s": _age_s(one, now),
        "verdict": one.verdict.value,
        "session": _session(one),
        "why": one.why,
    }
