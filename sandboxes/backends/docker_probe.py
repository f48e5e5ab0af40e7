"""What `doctor` says of an engine, a runtime and an image: what is wrong or weak, and what to type.

Above: `docker`. Below: `docker_engine`. Nothing is changed; one container is run and removed to look into the image.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from docker import errors

from sandboxes.backends.base import Problem
from sandboxes.backends.docker_engine import OLDEST_API, Engine, explain
from sandboxes.environment.image import DEFAULT_TAG

IMAGE_DEADLINE_S = 30.0
# Printed by the image's Python: its version, and which of the modules that the interpreter would like are missing.
LOOK = (
    "import json, sys, importlib.util as u; "
    "print(json.dumps([list(sys.version_info[:3]), [n for n in ('IPython', 'pip', 'numpy', 'matplotlib') "
    "if u.find_spec(n) is None]]))"
)
WITHOUT = {
    "IPython": "magics, `!cmd`, `obj?` and rich display do not work",
    "pip": "%pip does not work",
    "numpy": "models expect it",
    "matplotlib": "models expect it for figures",
}


def old_engine(version: Mapping[str, Any]) -> str | None:
    """Why this engine is too old, or None."""
    newest = str(version.get("ApiVersion", "0"))
    if tuple(map(int, newest.split("."))) < tuple(map(int, OLDEST_API.split("."))):
        return f"the engine's API is {newest}, and {OLDEST_API} (engine 20.10) is needed: update the engine"
    return None


def engine_problems(
    info: Mapping[str, Any], runtime: str | None, networks: list[str], wanted: frozenset[str]
) -> list[Problem]:
    """Findings in the engine's "system information"."""
    found: list[Problem] = []
    if not info.get("LiveRestoreEnabled"):
        found.append(
            Problem(
                "live-restore is off: a restart of the Docker engine ends every sandbox, and its variables are lost",
                'add "live-restore": true to /etc/docker/daemon.json, then: kill -HUP $(pidof dockerd)',
            )
        )
    if runtime and runtime not in (info.get("Runtimes") or {}):
        found.append(
            Problem(
                f"the engine has no runtime {runtime!r}; it has {', '.join(sorted(info.get('Runtimes') or {}))}",
                f'install {runtime} and add it to "runtimes" in /etc/docker/daemon.json, or set another runtime',
                fatal=True,
            )
        )
    for name, what in (
        ("MemoryLimit", "memory"),
        ("SwapLimit", "swap"),
        ("PidsLimit", "processes"),
        ("CpuCfsQuota", "cpu"),
    ):
        if info.get(name) is False:
            found.append(
                Problem(
                    f"the engine cannot limit {what} here",
                    "mount the control groups (v2, or v1's controllers); for swap on Debian: boot with swapaccount=1",
                )
            )
    options = " ".join(map(str, info.get("SecurityOptions") or []))
    if "name=seccomp" not in options:
        found.append(
            Problem("the engine applies no seccomp profile", "use a kernel and an engine that support seccomp")
        )
    found += [
        Problem(f"the engine has no network {name!r}", f"docker network create {name}", fatal=True)
        for name in sorted(wanted.difference(networks))
    ]
    return found


def image_problems(engine: Engine, image: str, runtime: str | None) -> list[Problem]:
    """What this image lacks, by running its Python once. Blocking. Raises what the SDK raises."""
    try:
        said, code = _run(engine, image, runtime)
    except errors.ImageNotFound:
        return [Problem(f"the engine has no image {image}", how_to_get(image), fatal=True)]
    except errors.APIError as error:
        return [
            Problem(
                f"the Python of {image} cannot be run: {explain(error)}",
                "choose an image with Python >= 3.11 as python3 on its PATH",
                fatal=True,
            )
        ]
    return read_look(image, said, code)


def how_to_get(image: str) -> str:
    """What to type when the engine does not have it."""
    if image == DEFAULT_TAG:
        return "toolhost setup --docker"
    return f"docker pull {image}, or toolhost setup --docker --tag {image}"


def read_look(image: str, said: str, code: int) -> list[Problem]:
    """Findings in what LOOK printed."""
    try:
        version, missing = json.loads(said.strip().splitlines()[-1])
        shown = ".".join(str(int(part)) for part in version)
        old = tuple(version) < (3, 11)
    except (ValueError, TypeError, IndexError):
        return [
            Problem(
                f"the Python of {image} does not work (exit code {code}): {said.strip()[-200:] or 'no output'}",
                "choose an image with Python >= 3.11",
                fatal=True,
            )
        ]
    if old:
        return [Problem(f"{image} has Python {shown}", "choose an image with Python >= 3.11", fatal=True)]
    return [
        Problem(f"{image} has no {name}: {WITHOUT[name]}", f"add {name} to the image, or: toolhost setup --docker")
        for name in missing
        if name in WITHOUT
    ]


def _run(engine: Engine, image: str, runtime: str | None) -> tuple[str, int]:
    api = engine.client(IMAGE_DEADLINE_S)
    host = {"NetworkMode": "none", "Memory": 512 << 20, "PidsLimit": 64, "CapDrop": ["ALL"]}
    if runtime:
        host["Runtime"] = runtime
    body = {
        "Image": image,
        "Entrypoint": ["python3", "-I", "-c", LOOK],
        "Cmd": [],
        "User": "0:0",
        "Labels": {"org.toolhost.purpose": "look"},
        "HostConfig": host,
    }
    container = api.create_container_from_config(body)["Id"]
    with _removed(engine, container):
        api.start(container)
        code = int(api.wait(container, timeout=IMAGE_DEADLINE_S)["StatusCode"])
        return api.logs(container, stdout=True, stderr=True).decode("utf-8", "replace"), code


@contextlib.contextmanager
def _removed(engine: Engine, container: str) -> Iterator[None]:
    try:
        yield
    finally:
        engine.client(IMAGE_DEADLINE_S).remove_container(container, force=True, v=True)
