"""`toolhost setup`: makes what sandboxes run in, with progress. Everything it does is in `sandboxes.environment`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import platformdirs
import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from sandboxes.environment import BuildFailed, Progress, Report, build_environment

# As sandboxes.environment.image says; not imported here, so that `--help` does not load the docker SDK.
DEFAULT_TAG = "toolhost-python:latest"

# A build is quiet for minutes while packages are installed, and the engine answers nothing then (seconds).
ENGINE_TIMEOUT_S = 900


def default_directory() -> Path:
    """Where the embedded environment is, unless a setting says otherwise."""
    return platformdirs.user_data_path("toolhost") / "environment"


def default_wheels() -> Path:
    """Where fetched packages are kept between builds. It may be deleted at any time."""
    return platformdirs.user_cache_path("toolhost") / "wheels"


def setup(
    docker: Annotated[bool, typer.Option("--docker", help="Build the image for the docker backend instead.")] = False,
    python: Annotated[
        Path | None,
        typer.Option(
            help="The Python that sandboxes run (default: the system's, where it is of the version that runs toolhost, "
            "else the one that runs toolhost)."
        ),
    ] = None,
    base_image: Annotated[
        str | None, typer.Option(help="With --docker: what to build on (default: as before, or python:3.12-slim).")
    ] = None,
    tag: Annotated[str, typer.Option(help="With --docker: the name of the image.")] = DEFAULT_TAG,
    engine: Annotated[
        str, typer.Option(help="With --docker: the engine's address.", envvar="DOCKER_HOST")
    ] = "unix:///var/run/docker.sock",
    directory: Annotated[Path | None, typer.Option(help="Where the embedded environment is made.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Build again even when it is up to date.")] = False,
) -> None:
    """Make what sandboxes run in: the embedded environment, or with --docker the image."""
    console = Console(highlight=False)
    place = directory or default_directory()
    what = f"the image {tag}" if docker else f"the sandbox environment in {place}"
    try:
        with reporting(console) as report:
            if docker:
                built = _build_image(engine, tag, base_image, force, report)
            else:
                built = build_environment(place, wheels=default_wheels(), report=report, python=python, force=force)
    except BuildFailed as error:
        Console(stderr=True, highlight=False).print(f"toolhost setup: {error.message}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("toolhost setup: interrupted; nothing is left of it, and nothing was changed")
        raise typer.Exit(130) from None
    console.print(f"{what} is {'ready' if built else 'up to date'}", markup=False, soft_wrap=True)


def _build_image(engine: str, tag: str, base_image: str | None, force: bool, report: Report) -> bool:
    import docker.errors

    from sandboxes.environment.image import build_image

    try:
        client = docker.DockerClient(base_url=engine, timeout=ENGINE_TIMEOUT_S)
    except docker.errors.DockerException as error:
        raise BuildFailed(
            f"no Docker engine answers at {engine} ({error}). Start it, or name another with --engine; "
            "without one, toolhost works with the embedded environment: toolhost setup"
        ) from error
    with closing(client):
        return build_image(client, tag, base_image=base_image, wheels=default_wheels(), report=report, force=force)


@contextmanager
def reporting(console: Console) -> Iterator[Report]:
    """A report that draws a bar on a terminal, and writes one line a step elsewhere."""
    if not console.is_terminal:
        yield _plain(console)
        return
    with Bar(
        SpinnerColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("starting", total=None)

        def draw(progress: Progress) -> None:
            # Output of packages and engines: shown as text, cut to one line, never as markup.
            detail = progress.detail.replace("[", r"\[")[: max(10, console.width - 60)]
            bar.update(
                task, total=progress.total, completed=progress.number - 1, description=f"{progress.step} [dim]{detail}"
            )

        yield draw


def _plain(console: Console) -> Callable[[Progress], None]:
    said: list[int] = []

    def write(progress: Progress) -> None:
        if progress.number not in said:
            said.append(progress.number)
            console.print(f"[{progress.number}/{progress.total}] {progress.step}", markup=False)

    return write
