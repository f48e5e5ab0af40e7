"""A tool host as its users have it: `toolhost serve` as a process of its own, on a free port of loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READY_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class RunningHost:
    """Starts, kills and restarts one host on one state directory. Sandboxes outlive `kill`, not `stop(purge=True)`."""

    def __init__(
        self,
        state_dir: Path,
        *,
        backend: str = "bubblewrap",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        python: Path | str = sys.executable,
    ) -> None:
        self.state_dir = state_dir
        self.backend = backend
        self.arguments = tuple(arguments)
        self.environment = dict(environment or {})
        self.port = port or free_port()
        self.python = str(python)
        self.log = state_dir.parent / f"{state_dir.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self) -> RunningHost:
        self.spawn()
        self._wait_until_live()
        return self

    def spawn(self) -> None:
        """Starts it without waiting for anything."""
        command = [
            *(self.python, "-m", "toolhost", "serve"),
            *("--listen", self.address, "--state-dir", str(self.state_dir), "--backend", self.backend),
            *self.arguments,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **self.environment}
            )

    def _wait_until_live(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the host ended with {self.process.returncode}:\n{self.log_text()[-4000:]}")
            try:
                self.get("/livez", timeout=5)
                return
            except (OSError, urllib.error.URLError):
                if time.monotonic() > deadline:
                    raise AssertionError(f"the host was not live in {READY_S} s:\n{self.log_text()[-4000:]}") from None
                time.sleep(0.02)

    def kill(self) -> None:
        """`kill -9`: nothing of the host's own clean-up runs."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, as a service manager stops it. Returns its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=timeout_s)

    def restart(self) -> RunningHost:
        self.kill()
        return self.start()

    def purge(self) -> None:
        """Ends the host and all its sandboxes: one that closes everything at its end takes up what is there first."""
        if self.running():
            self.kill()
        self.environment["TOOLHOST_LIFECYCLE__ON_STOP"] = "close"
        self.start()
        code = self.terminate()
        assert code == 0, self.log_text()[-4000:]

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float = 60.0,
    ) -> tuple[int, bytes]:
        asked = urllib.request.Request(self.url + path, data=body, headers=dict(headers or {}), method=method)
        try:
            with urllib.request.urlopen(asked, timeout=timeout) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def get(self, path: str, **options: Any) -> tuple[int, bytes]:
        return self.request("GET", path, **options)

    def get_json(self, path: str, **options: Any) -> Any:
        status, body = self.get(path, **options)
        assert status == 200, (status, body[:500])
        return json.loads(body)
