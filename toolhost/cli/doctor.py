"""`toolhost doctor`: what is wrong on this machine, and what to type. Changes nothing.

Above: the command table. Below: `config`, `backends`, `sandboxes`' public API.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sandboxes.backends.base import Backend, Problem
from sandboxes.environment import Status, environment_status
from sandboxes.errors import SandboxError
from sandboxes.owner import Owner
from sandboxes.stores.base import Store
from toolhost import interrupts
from toolhost.backends import create_backend, create_store, owner_of
from toolhost.cli.doctor_vllm import check_vllm, request_to_try, vllm_command
from toolhost.cli.findings import Finding
from toolhost.cli.serve import listening
from toolhost.config import Settings, load, proxies
from toolhost.errors import ConfigurationError

PYTHON_NEEDED = (3, 11)
FAILED = 1


class Client(enum.StrEnum):
    VLLM = "vllm"


def doctor(
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings file (TOML).")] = None,
    state_dir: Annotated[str | None, typer.Option(metavar="DIR", help="As for `toolhost serve`.")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="As for `toolhost serve`.")] = None,
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="As for `toolhost serve`.")] = None,
    client: Annotated[
        Client | None, typer.Option(help="Also: would this client find the host? And what to type there.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="With --client: how it will name this host.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check this machine; say what is wrong and what to type. Exit code 1 when something must be mended."""
    flags = {"state_dir": state_dir, "server": {"listen": listen}, "sandbox": {"backend": backend}}
    findings = list(examine(config, flags, client=client, name=name))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(f"{finding.grade:5}  {finding.check}: {finding.what}")
            if finding.mend:
                typer.echo(f"       → {finding.mend}")
        if client is not None and any(finding.check == "labels" for finding in findings):
            settings = load(config, flags)
            typer.echo(f"\nStart it:\n  {vllm_command(settings, name)}\nThen try:\n  {request_to_try()}")
    raise typer.Exit(FAILED if any(finding.grade == "wrong" for finding in findings) else 0)


def examine(
    config: Path | None, flags: Mapping[str, object], *, client: Client | None = None, name: str | None = None
) -> Iterator[Finding]:
    """Every check in turn; one that fails stops no other, except that without settings there is nothing to check."""
    yield _python()
    try:
        settings = load(config, flags)
    except ConfigurationError as error:
        yield Finding("settings", "wrong", error.message, "mend it there")
        return
    yield Finding("settings", "ok", str(config) if config else "no settings file; defaults and environment")
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        _state_dir,
        _environment,
        _backend,
        _store,
        _port,
        _vllm,
        _proxy,
        _speed,
    )
    for check in checks:
        yield from check(settings)
    if client is Client.VLLM:
        yield from check_vllm(settings, name)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= PYTHON_NEEDED:
        return Finding("python", "ok", version)
    return Finding("python", "wrong", f"{version} is too old", "install Python 3.11 or newer")


def _state_dir(settings: Settings) -> Iterator[Finding]:
    place = settings.state_dir
    nearest = next(parent for parent in (place, *place.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        mend = f"give another one with --state-dir, or make {nearest} writable"
        yield Finding("state directory", "wrong", f"{place}: {error.strerror or error}", mend)
        return
    free = os.statvfs(nearest)
    gib = free.f_bavail * free.f_frsize / (1 << 30)
    grade = "ok" if gib >= 1 else "weak"
    mend = "" if gib >= 1 else "free some space: sessions' files and the ledger are kept there"
    yield Finding("state directory", grade, f"{place} ({gib:.1f} GiB free)", mend)


def _environment(settings: Settings) -> Iterator[Finding]:
    if settings.sandbox.backend == "ray":
        return  # each node has its own, and its NodeHost says what is wrong with it
    place = settings.environment_dir
    status = environment_status(place)
    if status is Status.READY:
        yield Finding("sandbox environment", "ok", str(place))
    elif status is Status.STALE:
        yield Finding("sandbox environment", "weak", f"{place} was made from an older list", "toolhost setup")
    else:
        yield Finding("sandbox environment", "wrong", f"there is none in {place}", "toolhost setup")


def _backend(settings: Settings) -> Iterator[Finding]:
    try:
        if settings.sandbox.backend == "ray":
            if (refusal := _cluster_owner(settings)) is not None:
                yield refusal
                return
            # The nodes are those of the real owner: one that was made up would be given NodeHosts of its own there.
            backend = create_backend(settings, owner_of(settings))
            problems, missing = interrupts.run(_probe(backend))
        else:
            # An owner and a state directory made up for this: looking must not make the real ones.
            owner = Owner("doctor", b"doctor")
            with tempfile.TemporaryDirectory(prefix="toolhost-doctor-") as directory:
                backend = create_backend(settings.model_copy(update={"state_dir": Path(directory)}), owner)
                problems, missing = interrupts.run(_probe(backend))
    except (ConfigurationError, SandboxError) as error:
        yield Finding("isolation", "wrong", error.message)
        return
    for problem in problems:
        yield Finding("isolation", "wrong" if problem.fatal else "weak", problem.what, problem.mend)
    if not any(problem.fatal for problem in problems):
        yield Finding("isolation", "ok", f"{backend.name} can start sandboxes")
    if missing:
        what = f"{backend.name} does not give on this machine: {', '.join(sorted(missing))}"
        yield Finding(
            "isolation gaps", "weak", what, "see docs/isolation.md for what each means, and for what gives it"
        )


def _cluster_owner(settings: Settings) -> Finding | None:
    """What is wrong with the file that makes this host one of the cluster's; None when it can be read."""
    file = settings.ray.owner_file or settings.state_dir / "owner"
    mend = "copy it from another tool host of the cluster, mode 0600; the first one makes it when it starts"
    if not file.exists():
        return Finding("cluster", "wrong", f"there is no owner file {file}", mend)
    try:
        owner_of(settings)
    except (OSError, ValueError) as error:
        return Finding("cluster", "wrong", f"the owner file {file} cannot be read: {error}", mend)
    return None


async def _probe(backend: Backend) -> tuple[Sequence[Problem], frozenset[str]]:
    """What hinders it, and the guarantees that it does not give: known when nothing hinders it."""
    try:
        problems = await backend.probe()
        if any(problem.fatal for problem in problems):
            return problems, frozenset()
        await backend.open(launching=not backend.shared)  # a cluster's nodes are to stay as they are
        return problems, backend.differences
    finally:
        await backend.close()


def _store(settings: Settings) -> Iterator[Finding]:
    """The shared store, where there is one; the file of a host alone is looked at with its directory."""
    if not settings.store.redis:
        if settings.sandbox.backend == "ray":
            what = "sessions are kept in a file of this host: no other tool host can share the cluster"
            yield Finding("store", "weak", what, "for more than one tool host set store.url; docs/cluster.md")
        return
    try:
        interrupts.run(_reach(create_store(settings, Owner("doctor", b"doctor"))))
    except (ConfigurationError, SandboxError) as error:
        yield Finding("store", "wrong", error.message, "mend store.url, or start Redis; docs/cluster.md")
        return
    yield Finding("store", "ok", "Redis answers")


async def _reach(store: Store) -> None:
    """Raises StoreUnavailable."""
    try:
        await store.open()
    finally:
        await store.close()


def _port(settings: Settings) -> Iterator[Finding]:
    try:
        listening(settings).close()
    except ConfigurationError as error:
        yield Finding("port", "weak", error.message, "or leave it: a host that runs already holds its own port")
        return
    yield Finding("port", "ok", f"{settings.server.listen} is free")


def _vllm(_settings: Settings) -> Iterator[Finding]:
    """vLLM 0.13 to 0.29 does not pin mcp and dies at its start beside mcp 2."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if (0, 13) <= numbers <= (0, 29):
        what = f"vLLM {version} is in this environment and does not start beside mcp 2, which toolhost needs"
        yield Finding("vllm", "wrong", what, "install toolhost in an environment of its own")
    else:
        yield Finding("vllm", "ok", f"{version} in this environment")


def _proxy(_settings: Settings) -> Iterator[Finding]:
    found = proxies()
    if found:
        what = f"{', '.join(sorted(found))} is set: clients started from this shell ask the proxy for this host"
        yield Finding("proxy", "weak", what, "export no_proxy=localhost,127.0.0.1 (and this host's name) for clients")


def _speed(_settings: Settings) -> Iterator[Finding]:
    missing = [name for name in ("uvloop", "httptools") if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("speed", "weak", f"without {' and '.join(missing)}", "pip install 'toolhost[fast]'")
