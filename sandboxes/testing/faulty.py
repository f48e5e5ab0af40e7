"""A backend around another one, real or fake, that can be made slow, deaf or cut off: what networks and engines do.

Above: contract suites. Below: any backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sandboxes.backends.base import Backend, Channel, Problem, Status
from sandboxes.spec import Handle, SandboxSpec, Usage


class FaultyBackend(Backend):
    """`slow`: keys whose launch waits until `go_on` is set; `hung`: operations that never return; `channels`: every
    connection that was made, oldest first."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.slow: set[str] = set()
        self.launched: list[str] = []
        self.waiting = asyncio.Event()
        self.go_on = asyncio.Event()
        self.hung: set[str] = set()
        self.channels: list[Channel] = []

    def drop_channels(self) -> None:
        """Cuts every connection, as a transport that breaks does: without a word to either end."""
        for channel in self.channels:
            channel.writer.transport.abort()
        self.channels = []

    async def _pass(self, operation: str) -> None:
        if operation in self.hung:
            await asyncio.Event().wait()

    async def open(self, *, launching: bool = True) -> None:
        await self.inner.open(launching=launching)

    async def close(self) -> None:
        await self.inner.close()

    async def probe(self) -> Sequence[Problem]:
        return await self.inner.probe()

    @property
    def differences(self) -> frozenset[str]:
        return self.inner.differences

    async def launch(self, key: str, spec: SandboxSpec, workspace: str) -> Handle:
        first = not self.launched
        self.launched.append(key)
        if first and self.slow:
            self.waiting.set()
            await self.go_on.wait()
        await self._pass("launch")
        return await self.inner.launch(key, spec, workspace)

    async def lookup(self, key: str) -> Handle | None:
        return await self.inner.lookup(key)

    async def connect(self, handle: Handle) -> Channel:
        await self._pass("connect")
        channel = await self.inner.connect(handle)
        self.channels.append(channel)
        return channel

    async def poll(self, handle: Handle) -> Status:
        await self._pass("poll")
        return await self.inner.poll(handle)

    async def usage(self, handle: Handle) -> Usage:
        await self._pass("usage")
        return await self.inner.usage(handle)

    async def destroy(self, handle: Handle, *, keep_workspace: bool = False) -> None:
        await self._pass("destroy")
        await self.inner.destroy(handle, keep_workspace=keep_workspace)

    async def remove_workspace(self, workspace: str) -> None:
        await self.inner.remove_workspace(workspace)

    async def list_owned(self) -> Sequence[Handle]:
        return await self.inner.list_owned()

    async def list_workspaces(self) -> Sequence[str]:
        return await self.inner.list_workspaces()
