"""The connections that keep the fence of a node's sandboxes open.

Above: `ray_node`. Below: `agent.wire`, the node's own backend.

An agent ends itself when no host has been connected to it for `fence_s`. A node's process holds one connection to each
of its sandboxes, so that they live as long as it does, whoever else is connected; when it is gone for good, they end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from sandboxes.agent import wire
from sandboxes.backends.base import Backend
from sandboxes.errors import SandboxError, StateLost
from sandboxes.spec import Handle

log = logging.getLogger(__name__)

PAUSE_S = 0.2
GREET_S = 10.0
CHUNK = 1 << 16


class Feed:
    """`ended` is called with the handle of a sandbox that has ended by itself."""

    def __init__(self, local: Backend, ended: Callable[[Handle], None]) -> None:
        self._local = local
        self._ended = ended
        self._held: dict[str, tuple[Handle, asyncio.Task[None]]] = {}

    @property
    def handles(self) -> list[Handle]:
        return [handle for handle, _ in self._held.values()]

    def hold(self, handle: Handle) -> None:
        """Idempotent."""
        if handle.sandbox_id not in self._held:
            task = asyncio.create_task(self._hold(handle), name="feed")
            self._held[handle.sandbox_id] = (handle, task)

    def release(self, handle: Handle) -> None:
        """It is about to be destroyed: its end is no news."""
        if (held := self._held.pop(handle.sandbox_id, None)) is not None:
            held[1].cancel()

    async def close(self) -> None:
        tasks = [task for _, task in self._held.values()]
        self._held.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self, handle: Handle) -> None:
        while True:
            try:
                await self._connected(handle)
            except StateLost:
                break
            except (SandboxError, OSError, EOFError, TimeoutError) as error:
                log.info("feed of %s: %s", handle.sandbox_id, error)
            await asyncio.sleep(PAUSE_S)
        if self._held.pop(handle.sandbox_id, None) is not None:
            self._ended(handle)

    async def _connected(self, handle: Handle) -> None:
        """Until the connection ends. What the agent says after its hello is of no interest."""
        channel = await self._local.connect(handle)
        try:
            async with asyncio.timeout(GREET_S):
                channel.writer.write(wire.encode({"t": "hello", "v": wire.VERSION, "nonce": channel.nonce, "id": 0}))
                await channel.writer.drain()
            while await channel.reader.read(CHUNK):
                pass
        finally:
            with contextlib.suppress(OSError):
                await channel.close()
