"""What tests of operation share: a host on either backend, who talks to it, and the proof that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandboxes.backends.docker_container import LABEL
from sandboxes.owner import Owner
from tests.support.host import RunningHost
from tests.toolhost.rawclient import Stream

BACKENDS = [
    pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param("docker", marks=pytest.mark.docker),
]
ADMIN = "/v1/admin/sessions"


def running_sandboxes(host: RunningHost) -> list[str]:
    """What runs of this host's, by the owner files or the engine's labels: not by what the host says."""
    if host.backend == "docker":
        owner = Owner.load(host.state_dir).id
        return subprocess.run(
            ["docker", "ps", "--quiet", "--no-trunc", "--filter", f"label={LABEL}owner={owner}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=engine_of(host),
        ).stdout.split()
    found = []
    for file in (host.state_dir / "bubblewrap" / "sandboxes").glob("*/owner.json"):
        with contextlib.suppress(FileNotFoundError):
            init = json.loads(file.read_text())["init"]
            if init is not None and psutil.pid_exists(init["pid"]):
                found.append(str(init["pid"]))
    return found


def engine_of(host: RunningHost) -> dict[str, str]:
    """The environment for the engine's own client: this machine's engine, or the one that the host was given."""
    return {**os.environ, **host.environment}


def remove_from_outside(host: RunningHost, sandbox: str) -> None:
    """Ends a sandbox without asking its host."""
    if host.backend == "docker":
        subprocess.run(
            ["docker", "rm", "--force", sandbox], capture_output=True, timeout=60, check=True, env=engine_of(host)
        )
    else:
        psutil.Process(int(sandbox)).kill()


@contextlib.contextmanager
def operated(directory: Path, backend: str, *arguments: str, **environment: str) -> Iterator[RunningHost]:
    """A host that is started by the test; at the end nothing may be left of it."""
    variables = {"TOOLHOST_SANDBOX__MEMORY_BYTES": str(256 << 20), **environment}
    host = RunningHost(directory / "state", backend=backend, arguments=arguments, environment=variables)
    try:
        yield host
    finally:
        if host.running():
            host.kill()
        if running_sandboxes(host):
            prune(host, "--all", "--yes")
        assert running_sandboxes(host) == []


def prune(host: RunningHost, *arguments: str) -> subprocess.CompletedProcess[str]:
    return toolhost(
        "sessions",
        "prune",
        "--state-dir",
        str(host.state_dir),
        "--backend",
        host.backend,
        *arguments,
        env=host.environment,
    )


def toolhost(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "toolhost", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )


async def connect(host: RunningHost, headers: Mapping[str, str]) -> Stream:
    stream = await Stream.open(host.port, "/python/sse", list(headers.items()))
    try:
        assert stream.status == 200, stream.status
        await stream.initialize()
    except BaseException:
        stream.close()
        raise
    return stream


async def python(host: RunningHost, headers: Mapping[str, str], code: str, attempt: str | None = None) -> str:
    """Runs code over a connection of its own, which goes without a clean-up."""
    async with await connect(host, headers) as stream:
        return await stream.python(code, meta={"toolhost/attempt-id": attempt} if attempt else None)


async def admin(host: RunningHost, path: str = "", method: str = "GET", body: object = None, **headers: str) -> Any:
    content = None if body is None else json.dumps(body).encode()
    status, answer = await asyncio.to_thread(
        lambda: host.request(method, f"{ADMIN}{path}", headers=headers, body=content)
    )
    assert status < 300, (status, answer[:500])
    return json.loads(answer)


async def counts(host: RunningHost, **headers: str) -> dict[str, int]:
    found: dict[str, int] = (await admin(host, "?limit=1", **headers))["counts"]
    return found
