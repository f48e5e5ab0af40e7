"""A real interpreter process for tests: over a socketpair, with one real pipe for its output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

from sandboxes.agent.launch import command

CAP = 20_000
# No wait in these tests is longer: seconds.
PATIENCE = 30.0


class Died(Exception):
    """The process ended instead of answering."""


class InterpreterProcess:
    """Starts the process, sends cells, collects its output."""

    def __init__(
        self,
        directory: Path,
        python: str = sys.executable,
        modules: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.outputs = directory / ".outputs"
        self.site = directory / ".site"
        self._mine, theirs = socket.socketpair()
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [*prefix, *command(python, theirs.fileno(), str(directory), str(self.site), modules)],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        os.close(write)
        self._pipe = read
        self._frames = b""
        self._text = b""
        self._ended = False
        self._number = 0
        self.ready = self.frame()
        assert self.ready["t"] == "ready", self.ready

    def __enter__(self) -> InterpreterProcess:
        return self

    def __exit__(self, *details: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._mine.close()
        os.close(self._pipe)

    def send(self, code: str, cap: int = CAP, outputs: Path | None = None) -> int:
        self._number += 1
        where = str(outputs or self.outputs)
        frame = {"t": "cell", "n": self._number, "code": code, "cap": cap, "outputs": where}
        self._mine.sendall(json.dumps(frame).encode() + b"\n")
        return self._number

    def reap(self, pids: list[int]) -> None:
        self._mine.sendall(json.dumps({"t": "reap", "pids": pids}).encode() + b"\n")

    def frame(self) -> dict[str, Any]:
        """The next frame; output is taken in meanwhile. Raises Died, or TimeoutError after PATIENCE."""
        deadline = time.monotonic() + PATIENCE
        while b"\n" not in self._frames:
            self._pump(deadline, self._mine)
        line, _, self._frames = self._frames.partition(b"\n")
        return dict(json.loads(line))

    def _pump(self, deadline: float, *also: socket.socket) -> None:
        sources: list[Any] = [self._pipe, *also] if not self._ended else list(also)
        ready, _, _ = select.select(sources, [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"no answer; output so far: {self._text[-2000:]!r}")
        if self._pipe in ready:
            self._take()
        elif self._mine in ready:
            data = self._mine.recv(1 << 16)
            if not data:
                self.process.wait(PATIENCE)
                raise Died(self.process.returncode)
            self._frames += data

    def _take(self) -> None:
        data = os.read(self._pipe, 1 << 16)
        self._ended = not data
        self._text += data

    def output(self) -> str:
        """What was written to the pipe since last asked."""
        while not self._ended and select.select([self._pipe], [], [], 0)[0]:
            self._take()
        text, self._text = self._text.decode(errors="replace"), b""
        return text

    def output_until(self, mark: str) -> str:
        """Waits until `mark` has been written; returns everything up to now."""
        deadline = time.monotonic() + PATIENCE
        while mark.encode() not in self._text:
            self._pump(deadline)
        return self.output()

    def wait_until_output_stalls(self) -> None:
        """Waits until the unread output fills the pipe and the process sleeps in its write."""
        deadline = time.monotonic() + PATIENCE
        state = Path(f"/proc/{self.process.pid}/wchan")
        while not state.read_text().endswith(("pipe_write", "anon_pipe_write")) and self._unread() < (1 << 16) - 4096:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._unread()} bytes are waiting")
            time.sleep(0.001)

    def _unread(self) -> int:
        return int.from_bytes(fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)

    def frame_alone(self) -> dict[str, Any]:
        """The next frame, with the output left unread."""
        while b"\n" not in self._frames:
            if not select.select([self._mine], [], [], PATIENCE)[0]:
                raise TimeoutError("no answer")
            self._frames += self._mine.recv(1 << 16)
        return self.frame()

    def run(self, code: str, cap: int = CAP, outputs: Path | None = None) -> dict[str, Any]:
        """Runs a cell to its end: the frame, with `output` added."""
        number = self.send(code, cap, outputs)
        return self.result(number)

    def result(self, number: int) -> dict[str, Any]:
        answer = self.frame()
        assert answer["t"] == "done" and answer["n"] == number, answer
        return {**answer, "output": self.output()}

    def close_channel(self) -> None:
        self._mine.close()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
