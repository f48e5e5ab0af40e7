"""Drives a real agent process over its real channel: what the host's client does, in the least code."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sandboxes.agent import wire

AGENT = Path(wire.__file__).parent
LAUNCHER = AGENT / "toolhost_agent.py"
PATIENCE_S = 30.0
BRIEF_S = 1.0  # a deadline to be met by what hangs: on a busy machine too it must hang by then
Frame = dict[str, Any]


class Link:
    """One connection to an agent."""

    def __init__(self, source: int, sink: int, close: Callable[[], None]) -> None:
        self._source = source
        self._sink = sink
        self._close = close
        self._received = b""
        self._next = 0

    def close(self) -> None:
        self._close()

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._sink, data) :]

    def send(self, request: str, /, **fields: object) -> int:
        """Sends a request; returns its id."""
        self._next += 1
        self.write(wire.encode({"t": request, "id": self._next, **fields}))
        return self._next

    def read(self, timeout_s: float = PATIENCE_S) -> Frame:
        """The next frame. Raises EOFError at the end, TimeoutError when none comes."""
        until = time.monotonic() + timeout_s
        while True:
            while b"\n" not in self._received:
                if not select.select([self._source], [], [], max(0.0, until - time.monotonic()))[0]:
                    raise TimeoutError("no frame")
                data = os.read(self._source, 1 << 18)
                if not data:
                    raise EOFError
                self._received += data
            line, _, self._received = self._received.partition(b"\n")
            if line:
                frame: Frame = json.loads(line)
                return frame

    def until(self, *kinds: str, ident: int | None = None, timeout_s: float = PATIENCE_S) -> Frame:
        """The next frame of one of `kinds` (and of that request)."""
        until = time.monotonic() + timeout_s
        while True:
            frame = self.read(max(0.0, until - time.monotonic()))
            if frame["t"] in kinds and (ident is None or frame["id"] == ident):
                return frame

    def ask(self, request: str, /, **fields: object) -> Frame:
        ident = self.send(request, **fields)
        return self.until("ok", "error", "hello", ident=ident)

    # --- what tests do most

    def submit(self, call: str | dict[str, object], *, attempt: str | None = None, **fields: Any) -> tuple[str, int]:
        """Sends an execution: code as a text, or the arguments of a shell call. Returns (attempt, request id)."""
        attempt = attempt or secrets.token_hex(8)
        kind, arguments = ("python", {"code": call}) if isinstance(call, str) else ("shell", call)
        options = {"digest": json.dumps(call), "timeout": 30.0, "cap": 20_000, "queued": time.time(), **fields}
        return attempt, self.send("exec", attempt=attempt, kind=kind, call=arguments, **options)

    def run(self, call: str | dict[str, object], **fields: Any) -> Frame:
        """The result of an execution, acknowledged."""
        attempt, ident = self.submit(call, **fields)
        frame = self.until("result", "error", ident=ident)
        if frame["t"] == "result":
            assert self.ask("ack", attempts=[attempt])["t"] == "ok"
        return frame

    def shell(self, cmd: str | list[str], **more: object) -> Frame:
        fields = {key: more.pop(key) for key in ("timeout", "cap", "attempt") if key in more}
        return self.run({"cmd": cmd, "workdir": None, "env": {}, "shell": None, "user": None, **more}, **fields)


class Agent:
    """An agent in a plain subprocess, or in whatever `wrap` puts around its command."""

    def __init__(
        self,
        directory: Path,
        *,
        stdio: bool = False,
        wrap: Callable[[list[str], Path], list[str]] | None = None,
        python: str = sys.executable,
        interpreter: list[str] | None = None,
        fds: Sequence[int] = (),
        **config: object,
    ) -> None:
        self.data = directory / "data"
        self.data.mkdir(exist_ok=True)
        self.path = directory / "agent.sock"
        self.nonce = secrets.token_hex(16)
        self._stdio = stdio
        self._peers: list[socket.socket] = []
        fds = [*fds]
        channel: dict[str, object] = {"kind": "stdio"}
        if not stdio:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self.path))
            listener.listen(16)
            fds.append(listener.fileno())
            channel = {"kind": "listen_fd", "fd": listener.fileno()}
        self.config = {
            "sandbox": "box",
            "owner": "owner",
            "nonce": self.nonce,
            "channel": channel,
            "peer_check": wrap is not None and not stdio,
            "data": str(self.data) if wrap is None else "/mnt/data",
            "python": interpreter or [python],
            "site": [],
            "uid": None,
            "gid": None,
            "environment": {"PATH": os.environ["PATH"], "HOME": str(self.data), "LANG": "C.UTF-8"},
            "preimports": [],
            "limits": {},
            "timeout_s": 60.0,
            "grace_s": 0.5,
            "fence_s": 60.0,  # whatever becomes of the test, it ends
            **config,
        }
        source, sink = os.pipe()
        os.write(sink, json.dumps(self.config).encode())
        os.close(sink)
        fds.append(source)
        command = [python, "-I", "-B", "-S", str(LAUNCHER), f"fd:{source}"]
        if wrap is not None:
            command = wrap(command, self.data)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if stdio else subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdio else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=fds,
        )
        os.close(source)
        if not stdio:
            listener.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self) -> Link:
        """A connection that has said nothing yet."""
        if self._stdio:
            assert self.process.stdin is not None and self.process.stdout is not None
            return Link(self.process.stdout.fileno(), self.process.stdin.fileno(), lambda: None)
        peer = socket.socket(socket.AF_UNIX)
        self._peers.append(peer)
        peer.connect(str(self.path))
        return Link(peer.fileno(), peer.fileno(), peer.close)

    def hello(self) -> tuple[Link, Frame]:
        link = self.connect()
        return link, link.ask("hello", v=wire.VERSION, nonce=self.nonce)

    def claimed(self, *, epoch: int = 1, sequence: int = 0) -> Link:
        """A connection to the sandbox of session "s"."""
        link, hello = self.hello()
        assert hello["t"] == "hello", hello
        assert link.ask("claim", ticket="t", session="s", epoch=epoch, sequence=sequence)["t"] == "ok"
        return link

    def _stop(self) -> None:
        """By its channel: a signal to the outermost process would not reach it in a namespace."""
        try:
            link, _ = self.hello()
            link.ask("stop")
        except (OSError, EOFError, TimeoutError):
            self.process.send_signal(signal.SIGTERM)

    def close(self) -> str:
        """Ends it and returns its log."""
        if self.process.poll() is None:
            self._stop()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for peer in self._peers:
            peer.close()
        assert self.process.stderr is not None
        log = self.process.stderr.read().decode()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return log


def text(result: Frame) -> str:
    """What the code printed."""
    output = result["output"]
    return str(output["head"] + output["tail"])


def eventually(true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Waits until `true()` is."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.005)
    return False


def children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())
