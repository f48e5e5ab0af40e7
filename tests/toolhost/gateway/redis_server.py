"""A real Redis server of the tests' own, on a free port of loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.support.host import free_port

PATH = shutil.which("redis-server")


class RedisServer:
    """Started by the constructor, ended by `stop`; `start` begins another one on the same port: an empty one, or with
    what was written where it is `durable`."""

    def __init__(self, directory: Path, *, durable: bool = False) -> None:
        assert PATH is not None
        self.port = free_port()
        self._command = [PATH, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
        self._command += ["--appendonly", "yes", "--appendfsync", "always"] if durable else ["--appendonly", "no"]
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "redis-server did not start"
                assert self.process.poll() is None, "redis-server ended"
                time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
