"""A Docker engine of the test's own, to be restarted and stopped: the machine's engine and network stay as they are.

It has its own directories, socket and network namespace, in which it makes its own bridge and rules.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import psutil
import pytest

IMAGES = ("toolhost-base:debian12", "toolhost-python:latest")  # the smaller one first
START_S = 60.0
STOP_S = 60.0


class PrivateEngine:
    """`place`: an empty directory with a short path (sockets are in it)."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.url = f"unix://{place}/sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.image = ""

    def start(self, *, live_restore: bool) -> None:
        config = self.place / "daemon.json"
        config.write_text("{}")
        command = [
            *("unshare", "--net", "--", "dockerd", "--config-file", str(config), "--host", self.url),
            *("--data-root", str(self.place / "data"), "--exec-root", str(self.place / "exec")),
            *("--pidfile", str(self.place / "pid")),
            *(["--live-restore"] if live_restore else []),
        ]
        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < until, self.log()
            time.sleep(0.05)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as asking:  # the SDK forgets to close one that it could not connect
            asking.settimeout(5)
            try:
                asking.connect(str(self.place / "sock"))
                asking.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 " in asking.recv(100)
            except OSError:
                return False

    def stop(self) -> None:
        """As a service manager stops it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_S)

    def restart(self, *, live_restore: bool) -> None:
        self.stop()
        self.start(live_restore=live_restore)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing in it runs; its socket takes connections, and nobody answers them."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def load(self) -> None:
        """Brings the sandbox image over from the machine's engine."""
        with contextlib.closing(docker.from_env()) as theirs, self.client() as ours:
            # One request: `images.list` asks for each image again, and another test may have removed one by then.
            tags = {tag for image in theirs.api.images() for tag in image["RepoTags"] or ()}
            self.image = next(name for name in IMAGES if name in tags)
            ours.images.load(theirs.images.get(self.image).save(named=self.image))

    @contextlib.contextmanager
    def client(self) -> Iterator[docker.DockerClient]:
        with contextlib.closing(docker.DockerClient(base_url=self.url, version="1.41", timeout=60)) as client:
            yield client

    def close(self) -> None:
        """Ends it with everything it started, and removes its directories."""
        if self.process is not None and self.process.poll() is None:
            with self.client() as client:
                for container in client.containers.list(all=True, ignore_removed=True):
                    container.remove(force=True)
            self.stop()
        left = [
            one for one in psutil.process_iter(["cmdline"]) if str(self.place) in " ".join(one.info["cmdline"] or ())
        ]
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=STOP_S)
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in sorted((one for one in mounts if one.startswith(f"{self.place}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(self.place)
        assert left == [], "processes of the engine were left"

    def log(self) -> str:
        return (self.place / "log").read_text(errors="replace")[-4000:]


@contextlib.contextmanager
def private_engine() -> Iterator[PrivateEngine]:
    """Started, with the sandbox image. Skips where this machine cannot have one."""
    missing = [name for name in ("dockerd", "containerd", "unshare") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"an engine of its own needs root, and dockerd, containerd and unshare (missing: {missing})")
    engine = PrivateEngine(Path(tempfile.mkdtemp(prefix="engine-", dir="/tmp")))
    try:
        engine.start(live_restore=True)
        engine.load()
        yield engine
    finally:
        engine.close()
