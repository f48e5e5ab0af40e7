"""The test's end of `replica`: calls that wait, and calls that are waited for later."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from tests.sandboxes.backends import ray_host
from tests.support.cluster import Cluster

CALL_S = 120.0
UNUSED_S = 6.0


class Failed(Exception):
    """What the replica raised: `kind` is the class's name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Driver:
    """A replica on the edge, opened."""

    def __init__(self, cluster: Cluster, unused_s: float = UNUSED_S) -> None:
        directory = ray_host.prepare(cluster)
        self._running = cluster.popen(
            cluster.edge,
            [sys.executable, "-m", "tests.cluster.replica", str(directory), str(unused_s)],
            environment={"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._sending = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        self.call("open")

    def begin(self, op: str, /, **arguments: Any) -> Future[Any]:
        ident = next(self._ids)
        answer: Future[Any] = Future()
        self._waiting[ident] = answer
        assert self._running.stdin is not None
        with self._sending:
            self._running.stdin.write(json.dumps({"id": ident, "op": op, "args": arguments}).encode() + b"\n")
            self._running.stdin.flush()
        return answer

    def call(self, op: str, /, **arguments: Any) -> Any:
        return self.begin(op, **arguments).result(CALL_S)

    def kill(self) -> None:
        self._running.kill()
        self._running.wait(30)

    def _read(self) -> None:
        assert self._running.stdout is not None
        for line in self._running.stdout:
            fields = json.loads(line)
            answer = self._waiting.pop(fields["id"])
            if "error" in fields:
                answer.set_exception(Failed(fields["error"], fields["message"]))
            else:
                answer.set_result(fields["ok"])
        for answer in self._waiting.values():
            answer.set_exception(Failed("Dead", "the replica has ended"))


@contextlib.contextmanager
def replica(cluster: Cluster, unused_s: float = UNUSED_S) -> Iterator[Driver]:
    """One that is ended at the end. Its sandboxes live on."""
    driver = Driver(cluster, unused_s)
    try:
        yield driver
    finally:
        driver.kill()


def within(bound_s: float, condition: Callable[[], Any], what: str) -> float:
    """Waits until it holds; returns how long that took, in seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < bound_s, f"not within {bound_s:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began
