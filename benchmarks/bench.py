"""What the cases share: where they may write, what this machine has, and how long they may take."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import tool_host
from benchmarks.raw_client import RawClient
from tests.support.host import RunningHost

BACKENDS = ("bubblewrap", "docker")
IMAGE = "toolhost-python"
_numbers = itertools.count(1)


@dataclass
class Bench:
    """`full`: more samples, more sessions. `left_out`: what this machine lacks, by the name that tables give it."""

    directory: Path
    full: bool
    left_out: dict[str, str] = field(default_factory=dict)

    def pick(self, quick: int, full: int) -> int:
        return full if self.full else quick

    @property
    def backends(self) -> list[str]:
        """Those that run here."""
        return [name for name in BACKENDS if f"toolhost, {name}" not in self.left_out]

    @property
    def docker(self) -> bool:
        return "docker" not in self.left_out

    @contextlib.asynccontextmanager
    async def host(self, backend: str, **settings: object) -> AsyncIterator[RunningHost]:
        values = {name: str(value) for name, value in settings.items()}
        directory = self.directory / str(next(_numbers))
        directory.mkdir()
        async with tool_host(directory, backend, **values) as host:
            yield host


async def session(host: RunningHost, ident: str) -> RawClient:
    """A connection to the python namespace."""
    client = RawClient("127.0.0.1", host.port, "/python/sse", {"x-session-id": ident})
    await client.connect()
    return client


def missing() -> dict[str, str]:
    """What cannot be measured here, and why."""
    found: dict[str, str] = {}
    if os.uname().sysname != "Linux":
        found["toolhost, bubblewrap"] = "Linux only"
    if shutil.which("docker") is None or _fails("docker", "version"):
        found |= dict.fromkeys(("toolhost, docker", "docker"), "no Docker engine answers")
    elif _fails("docker", "image", "inspect", IMAGE):
        found |= dict.fromkeys(("toolhost, docker", "docker"), "no sandbox image (make image)")
    return found


def _fails(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=30).returncode != 0
