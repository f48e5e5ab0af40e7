"""What the tests of the bubblewrap backend share: a backend with a small environment, as root or as an ordinary user,
and just enough of the wire to run code in a sandbox."""

from __future__ import annotations

import asyncio
import json
import multiprocessing  # noqa: F401 - loaded before the uid is dropped
import os
import pickle
import shutil
import sys
import traceback
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import sandboxes.agent
from sandboxes.agent import wire
from sandboxes.backends.base import Channel
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.environment import Environment, Mount
from sandboxes.owner import Owner
from sandboxes.spec import Handle, Limits, SandboxSpec

NOBODY = 65534
SMALL = SandboxSpec(limits=Limits(memory_bytes=256 << 20, processes=32, tmp_bytes=16 << 20, shm_bytes=16 << 20))
INSIDE = PurePosixPath("/opt/python")


def environment() -> Environment:
    """The interpreter that runs the tests if it can be mounted for this uid, else the system's."""
    prefix = Path(sys.base_prefix)
    if os.geteuid() == 0 and prefix != Path("/usr"):
        mounts: tuple[Mount, ...] = (Mount(prefix, INSIDE),)
        python = INSIDE / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    else:
        mounts, python = (
            (),
            PurePosixPath(shutil.which("python3", path="/usr/bin:/usr/local/bin") or "/usr/bin/python3"),
        )
    return Environment((PurePosixPath("/opt"),), mounts, python, sys.version.split()[0], "/usr/bin:/bin")


@dataclass
class Host:
    """A place for hosts: a state directory, and the agent's programs where every uid can read them."""

    state: Path
    agent: Path

    @classmethod
    def make(cls, directory: Path, uid: int) -> Host:
        directory.chmod(0o755)
        host = cls(directory / "state", directory / "agent")
        shutil.copytree(sandboxes.agent.__path__[0], host.agent)
        host.state.mkdir(mode=0o700)
        for path in (host.state, *host.agent.iterdir()):
            os.chown(path, uid, uid)
        return host

    def backend(self, **options: object) -> BubblewrapBackend:
        owner = Owner.load(self.state)
        return BubblewrapBackend(
            **{"state_dir": self.state, "owner": owner, "environment": environment, "agent": self.agent, **options}
        )

    @asynccontextmanager
    async def opened(self, **options: object) -> AsyncIterator[BubblewrapBackend]:
        """A backend whose sandboxes are destroyed at the end."""
        backend = self.backend(**options)
        await backend.open()
        try:
            yield backend
        finally:
            try:
                for handle in await backend.list_owned():
                    await backend.destroy(handle)
            finally:
                await backend.close()

    def leftovers(self) -> list[str]:
        """Everything that belongs to a sandbox and is still there."""
        root = self.state / "bubblewrap"
        places = [root / name for name in ("sandboxes", "workspaces", "trash", "locks")]
        return sorted(str(path) for place in places for path in place.iterdir())


class Talk:
    """A greeted connection to an agent that belongs to a session."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0

    async def ask(self, frame: str, **fields: object) -> dict[str, object]:
        """The last reply to a request."""
        self._number += 1
        self._channel.writer.write(wire.encode({"t": frame, "id": self._number, **fields}))
        while True:
            reply = wire.decode(await self._channel.reader.readline(), wire.REPLIES)
            if reply["t"] in ("ok", "result", "error", "hello"):
                return reply

    async def python(self, code: str) -> str:
        """What the code printed, and its traceback."""
        result = await self.ask(
            "exec",
            attempt=os.urandom(8).hex(),
            digest="0" * 64,
            kind="python",
            call={"code": code},
            timeout=20.0,
            cap=20000,
            queued=0.0,
        )
        if result["t"] != "result":
            return json.dumps(result)
        output = result["output"]
        return f"{output['head']}{output['tail']}{result['error'] or ''}".strip()


@asynccontextmanager
async def talking(backend: BubblewrapBackend, handle: Handle) -> AsyncIterator[Talk]:
    channel = await backend.connect(handle)
    try:
        talk = Talk(channel)
        hello = await talk.ask("hello", v=wire.VERSION, nonce=channel.nonce)
        assert hello["t"] == "hello" and hello["sandbox"] == handle.sandbox_id, hello
        if hello["claim"] is None:
            await talk.ask("claim", ticket="t" * 64, session="p/request/s", epoch=0, sequence=0)
        yield talk
    finally:
        await channel.close()


async def python(backend: BubblewrapBackend, handle: Handle, code: str) -> str:
    async with talking(backend, handle) as talk:
        return await talk.python(code)


def as_user(uid: int, body: Callable[[], Awaitable[None]]) -> None:
    """Runs a test's body in a child that has become another user for good. Raises AssertionError with its traceback."""
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the child of a process with threads: it starts its own
        child = os.fork()
    if child == 0:
        said = ""
        try:
            os.close(receiving)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.chdir("/")
            asyncio.set_event_loop_policy(None)
            asyncio.run(body())
        except BaseException:  # noqa: BLE001 - it is carried to the parent
            said = traceback.format_exc()
        finally:
            with os.fdopen(sending, "wb") as pipe:
                pickle.dump(said, pipe)
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert text, "the child ended without a word"
    said = pickle.loads(text)
    assert not said, said
