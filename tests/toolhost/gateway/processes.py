"""Gateways as their users have them: `toolhost gateway` as processes of their own, to be killed at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.host import free_port

READY_S = 60.0


class GatewayProcess:
    """One gateway. `arguments` are further ones of the command, `environment` settings as variables."""

    def __init__(self, directory: Path, name: str, *arguments: str, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"{name}.log"
        self._command = [
            *(sys.executable, "-m", "toolhost", "gateway", "--listen", f"127.0.0.1:{self.port}"),
            *("--model", "fake", "--state-dir", str(directory / "state")),
            *arguments,
        ]
        self._environment = {**os.environ, **environment}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> GatewayProcess:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment
            )
        deadline = time.monotonic() + READY_S
        while True:
            assert self.process.poll() is None, f"the gateway ended:\n{self.log.read_text()[-4000:]}"
            try:
                with urllib.request.urlopen(f"{self.url}/livez", timeout=5):
                    return self
            except (OSError, urllib.error.URLError):
                assert time.monotonic() < deadline, f"the gateway was not live:\n{self.log.read_text()[-4000:]}"
                time.sleep(0.05)

    def kill(self) -> None:
        """`kill -9`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=60)
