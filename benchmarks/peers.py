"""What people use today, to measure beside: containers through the Docker SDK, programs in environments of their own.

gpt-oss's Python tool is re-created from what it does for each call: a container is created and started, the script is
copied into it, executed there, and the container removed. The image is our own, so that all run the same interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.bench import IMAGE, Bench
from tests.clients.environments import Environment, pip_environment

SCRIPTS = Path(__file__).with_name("peer_scripts")
CODE = "print(1+1)"
ENVIRONMENTS = {
    "ipykernel": pip_environment("bench-ipykernel", "ipykernel", "jupyter_client"),
    "llm-sandbox": pip_environment("bench-llm-sandbox", "llm-sandbox[docker]"),
}
ANSWER_S = 120.0


class Containers:
    """The Docker SDK, whose calls block: each runs in a thread."""

    def __init__(self) -> None:
        import docker

        self._docker = docker.from_env()
        self._lasting: Any = None

    async def call_of_gpt_oss(self) -> None:
        await asyncio.to_thread(self._call)

    async def create_and_start(self) -> float:
        """Until the engine says it runs; seconds. Removing it is not counted."""
        return await asyncio.to_thread(self._create_and_start)

    async def execute(self) -> None:
        """`docker exec` of one line in a container that runs already."""
        await asyncio.to_thread(self._execute)

    async def open(self) -> None:
        self._lasting = await asyncio.to_thread(self._create)
        await asyncio.to_thread(self._lasting.start)

    async def close(self) -> None:
        if self._lasting is not None:
            await asyncio.to_thread(self._lasting.remove, force=True)
        self._docker.close()

    def _create(self) -> Any:
        return self._docker.containers.create(
            IMAGE, entrypoint=["sleep", "600"], command=[], detach=True, network_mode="none"
        )

    def _call(self) -> None:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            member = tarfile.TarInfo("script.py")
            member.size = len(CODE)
            tar.addfile(member, io.BytesIO(CODE.encode()))
        container = self._create()
        try:
            container.start()
            container.put_archive("/tmp", archive.getvalue())
            _expect(container.exec_run(["python3", "/tmp/script.py"]).output)
        finally:
            container.remove(force=True)

    def _create_and_start(self) -> float:
        began = time.perf_counter()
        container = self._create()
        try:
            container.start()
            return time.perf_counter() - began
        finally:
            container.remove(force=True)

    def _execute(self) -> None:
        _expect(self._lasting.exec_run(["python3", "-c", CODE]).output)


class Peer:
    """A script of `peer_scripts` in its own environment: a line in, and when it has done it, a JSON line out."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_S)
        answer: dict[str, Any] = json.loads(line or b'{"error": "it ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    async def seconds(self, what: str) -> float:
        """As the script itself measured it: without the way to and from it."""
        return float((await self.ask(what))["seconds"])


@contextlib.asynccontextmanager
async def containers(bench: Bench) -> AsyncIterator[Containers | None]:
    """None without an engine."""
    if not bench.docker:
        yield None
        return
    found = Containers()
    try:
        await found.open()
        yield found
    finally:
        await found.close()


@contextlib.asynccontextmanager
async def peer(bench: Bench, name: str, *, start: str = "start") -> AsyncIterator[Peer | None]:
    """A peer that has started; None where its environment cannot be made, and that is noted."""
    environment = ENVIRONMENTS[name]
    if name in bench.left_out or (name == "llm-sandbox" and not bench.docker):
        bench.left_out.setdefault(name, "no Docker engine answers")
        yield None
        return
    process = None
    try:
        await asyncio.to_thread(_make, environment)
        script = SCRIPTS / f"run_{name.replace('-', '_')}.py"  # not named as what it imports
        process = await asyncio.create_subprocess_exec(
            environment.python, script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        found = Peer(process)
        if start:
            await found.ask(start)
    except Exception as error:  # noqa: BLE001 - somebody else's program: named and left out
        bench.left_out[name] = f"{type(error).__name__}: {error}"[:200]
        found = None
    try:
        yield found
    finally:
        if process is not None:
            await _end(process)


def _make(environment: Environment) -> None:
    try:
        environment.make()
    except SystemExit as error:
        raise RuntimeError(str(error)) from None


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 30)
    except TimeoutError:
        process.kill()
        await process.wait()


def _expect(output: bytes) -> None:
    if output.strip() != b"2":
        raise RuntimeError(f"it printed {output[:200]!r}")
