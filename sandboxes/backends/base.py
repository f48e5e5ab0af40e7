"""The contract of a backend: from a spec to something isolated, and nothing else.

Above: `manager` (launch, destroy, adoption), `pool` and `reaper` (launch, destroy, list_owned), `client` (connect).
Below: an engine. Nothing above this line may assume that a sandbox is on this machine.

Every method has its own deadline and is safe to cancel; one that hangs delays nobody else. Every method may raise
`EngineUnavailable` (the engine does not answer in time), and only the errors that it names beside that.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandboxes.spec import Handle, SandboxSpec, Usage


class Channel(abc.ABC):
    """A byte stream to an agent. Closed exactly once, by who opened it (the client)."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    nonce: str  # what the agent expects in `hello`

    @abc.abstractmethod
    async def close(self) -> None:
        """Closes both directions. Never raises. Called by the client; the sandbox lives on."""


class PromptReader(asyncio.StreamReader):
    """A reader whose user may take what arrives in the very moment, without a task that wakes up for it.

    While `read` waits, `taker` is given every piece, and gives back what is to be read: b"" when it has taken all.
    """

    taker: Callable[[bytes], bytes] | None = None
    _waits = False

    async def read(self, n: int = -1) -> bytes:
        self._waits = True
        try:
            return await super().read(n)
        finally:
            self._waits = False

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # protocols hand over bytes
        if self._waits and self.taker is not None:
            data = self.taker(data)
            if not data:
                return
            self._waits = False  # what comes next comes after this
        super().feed_data(data)


class StreamChannel(Channel):
    """A channel that is a connected socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nonce: str) -> None:
        self.reader = reader
        self.writer = writer
        self.nonce = nonce

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class Life(enum.StrEnum):
    RUNNING = "running"
    ENDED = "ended"  # it is there, and its PID 1 is not running
    GONE = "gone"  # the engine knows nothing of it


@dataclass(frozen=True, slots=True)
class Status:
    """What the engine says of a sandbox. `detail` is for people: "exit code 137, out of memory"."""

    life: Life
    detail: str = ""
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding of `doctor`: what is wrong, and what to type. `fatal`: no sandbox can be launched."""

    what: str
    mend: str
    fatal: bool = False


class Backend(abc.ABC):
    """One way to isolate. Created by the composition root, opened and closed by it.

    `shared`: several hosts (replicas) use the same sandboxes at once. Then `launch`, `lookup` and `connect` mean the
    same from each of them, `list_owned` lists those of all, and a handle names its node; `destroy` of a handle that was
    replaced leaves its successor alone, and `connect` and `poll` raise NodeGone where its node is lost.
    """

    name: str
    shared: bool = False

    @abc.abstractmethod
    async def open(self, *, launching: bool = True) -> None:
        """Called once, first. Raises IsolationUnavailable, EnvironmentMissing: the host then does not start.

        Not `launching`: `launch` will not be called. Then neither environment nor image is needed.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Called once at the end. Frees what this object holds; sandboxes live on. Never raises."""

    @abc.abstractmethod
    async def probe(self) -> Sequence[Problem]:
        """What is missing or weak here. Called by `doctor`, also on a backend that was not opened. Never raises."""

    @property
    @abc.abstractmethod
    def differences(self) -> frozenset[str]:
        """Names of the guarantees that this backend does not give here (see docs/isolation.md). Known after `open`."""

    @abc.abstractmethod
    async def launch(self, key: str, spec: SandboxSpec, workspace: str) -> Handle:
        """Starts a sandbox under `key` with the workspace of that name (made when new), or returns the running one.

        `key` and `workspace` are 1 to 64 of `a-z 0-9 . _ -`. It returns when the agent can be connected to; the
        interpreter may still be starting. Nothing is left behind when it raises or is cancelled.
        Raises NoCapacity, EnvironmentMissing, IsolationUnavailable.
        """

    @abc.abstractmethod
    async def lookup(self, key: str) -> Handle | None:
        """The handle of what runs under `key`, or None. Raises StateLost where it is known to have moved (cluster)."""

    @abc.abstractmethod
    async def connect(self, handle: Handle) -> Channel:
        """A new byte stream to this very instance. Raises StateLost when it is not running or was replaced."""

    @abc.abstractmethod
    async def poll(self, handle: Handle) -> Status:
        """Whether it runs, and if not, why it ended. Called when a channel broke, and by sweeps."""

    @abc.abstractmethod
    async def usage(self, handle: Handle) -> Usage:
        """What it uses now. Called for the operators' list. Unknown figures are None. Raises StateLost."""

    @abc.abstractmethod
    async def destroy(self, handle: Handle, *, keep_workspace: bool = False) -> None:
        """Ends it and everything in it, and removes its workspace unless told to keep it. Idempotent: of a sandbox
        that is gone it removes what is left. When it returns no process of it is left."""

    @abc.abstractmethod
    async def remove_workspace(self, workspace: str) -> None:
        """Removes a workspace that no running sandbox uses. Idempotent."""

    @abc.abstractmethod
    async def list_owned(self) -> Sequence[Handle]:
        """Every sandbox of this owner, running or ended, also of an earlier process. Never another owner's."""

    def title(self, handle: Handle) -> str:
        """What people find it by on its machine, with the tools of what runs it. Asks nothing."""
        return handle.sandbox_id

    @abc.abstractmethod
    async def list_workspaces(self) -> Sequence[str]:
        """The names of all workspaces, also of those that no sandbox has any more."""
