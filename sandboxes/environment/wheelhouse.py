"""A directory of wheels for one target, fetched once and shared by the embedded environment and the image.

Above: embedded, image. Below: pip, as a command; the operator's own index, proxy and certificate settings apply.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from sandboxes.environment.command import BuildFailed, run
from sandboxes.environment.interpreter import Target
from sandboxes.environment.recipe import list_digest, recipe_directory


def pip_command() -> list[str]:
    """pip, run by this process's own Python. Raises BuildFailed where it is not installed."""
    if importlib.util.find_spec("pip") is None:
        raise BuildFailed(f"pip is not installed beside toolhost: install it with {sys.executable} -m ensurepip")
    return [sys.executable, "-m", "pip"]


def fill(root: Path, target: Target, *, python: Path | None, on_line: Callable[[str], None]) -> Path:
    """The wheelhouse for `target` below `root`, with every wheel of the requirement list; fetched where it is missing.

    `python`: an interpreter of that target on this machine, which then decides what its version needs; None where there
    is none (an image's). A fetch that was cut short starts again, but what pip had cached is not fetched twice.
    Whoever calls this holds the lock of `root`. Raises BuildFailed.
    """
    place = root / f"{target.name}-{list_digest()[:12]}"
    if place.is_dir():
        return place
    aside = place.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    major, minor = target.version
    chosen = ["--python", str(python)] if python else []
    fits = ["--implementation", "cp", "--python-version", f"{major}.{minor}"]
    fits += [part for abi in (f"cp{major}{minor}", "abi3", "none") for part in ("--abi", abi)]
    fits += [part for platform in target.platforms() for part in ("--platform", platform)]
    try:
        run(
            [
                *(*pip_command(), *chosen, "download", "--no-input", "--disable-pip-version-check"),
                *("--progress-bar=off", "--only-binary=:all:", *fits, "--dest", str(aside)),
                *("-r", str(recipe_directory() / "requirements.txt")),
            ],
            on_line=on_line,
            failure=(
                f"the packages for {target.name} could not be fetched. Is the package index reachable "
                "(pip's own settings and PIP_INDEX_URL apply), and is there room on the disk? Then run the same again"
            ),
        )
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for other in root.glob(f"{target.name}-*"):
        if other != place:
            shutil.rmtree(other, ignore_errors=True)
    return place
