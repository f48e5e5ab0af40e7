"""Runs a client's script in that client's own environment and reads its report."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.clients.environments import ENVIRONMENTS

SCRIPTS = Path(__file__).parent / "scripts"


def drive(
    client: str, script: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 110.0
) -> Any:
    """The report of `scripts/{script}` run by `client`. Fails with what the script printed."""
    program = ENVIRONMENTS[client].node if script.endswith(".cjs") else ENVIRONMENTS[client].python
    done = run(client, str(program), str(SCRIPTS / script), *arguments, environment=environment, timeout_s=timeout_s)
    reports = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert done.returncode == 0 and len(reports) == 1, (
        f"{script} in {client}: {done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )
    return json.loads(reports[0])


def run(
    client: str, *command: str, environment: Mapping[str, str] | None = None, timeout_s: float = 110.0
) -> subprocess.CompletedProcess[str]:
    """Runs a program of a client's environment to its end."""
    found = ENVIRONMENTS[client]
    # Not this process's environment: a client has its own packages, and no proxy stands before loopback.
    base = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "NODE_PATH": str(found.modules)}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**base, **(environment or {})},
        check=False,
    )


def start(client: str, script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts `scripts/{script}` and leaves it running; its caller ends it."""
    return subprocess.Popen(
        [ENVIRONMENTS[client].python, SCRIPTS / script, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )
