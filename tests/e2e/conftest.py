"""A host as its users have it, on bubblewrap, and the proof that nothing of it is left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.host import RunningHost

LEFT_S = 30.0


def sandboxes(host: RunningHost) -> list[int]:
    """PIDs of the running sandboxes of a host, by the owner files that its backend keeps."""
    found = []
    for file in (host.state_dir / "bubblewrap" / "sandboxes").glob("*/owner.json"):
        try:
            init = json.loads(file.read_text())["init"]
        except FileNotFoundError:
            continue
        if init is not None and psutil.pid_exists(init["pid"]):
            found.append(int(init["pid"]))
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for what another process does; fails by name when it does not happen."""
    deadline = time.monotonic() + LEFT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RunningHost]:
    running = RunningHost(tmp_path / "state")
    running.start()
    yield running
    running.purge()
    assert sandboxes(running) == []
