"""Sandboxes that are ready before anybody asks. They count within the cap, and give way to real demand.

Above: `manager`. Below: `engine`, `sandbox`, `clock`.
A pooled sandbox has no session: its agent is unclaimed. Taking one hands it over with its connection open.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable

from sandboxes.clock import Clock
from sandboxes.engine import Engine
from sandboxes.errors import ChannelStalled, SandboxError
from sandboxes.observer import Observer
from sandboxes.sandbox import Sandbox
from sandboxes.spec import SandboxSpec

RETRY_S = 5.0  # after a launch that failed
REFILL_S = 0.1  # after one was taken: its first call goes before a launch, which takes a processor for a while
READY_S = 60.0  # from the launch to an interpreter with its pre-imports
POLL_S = 0.02


class Pool:
    """`room()`: how many more sandboxes the caps allow beside those of sessions, the pooled ones not subtracted."""

    def __init__(
        self, engine: Engine, spec: SandboxSpec, size: int, *, room: Callable[[], int], clock: Clock, observer: Observer
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._size = size
        self._room = room
        self._clock = clock
        self._observer = observer
        self._ready: deque[Sandbox] = deque()
        self._launching: Sandbox | str | None = None
        self._taken = False
        self._awaited = 0  # who waits for what is being launched: it is not sent away as surplus
        self._changed = asyncio.Event()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._removing: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def count(self) -> int:
        """Sandboxes that exist for the pool, ready or on the way in or out."""
        return len(self._ready) + (self._launching is not None) + len(self._removing)

    @property
    def names(self) -> set[str]:
        """Sandbox ids and launch keys of the pool: no sweep may take them for orphans."""
        names = {sandbox.handle.sandbox_id for sandbox in self._ready}
        if isinstance(self._launching, Sandbox):
            names |= {self._launching.handle.sandbox_id, self._launching.handle.key}
        elif self._launching is not None:
            names.add(self._launching)
        return names

    def start(self) -> None:
        if self._size > 0:
            self._task = asyncio.create_task(self._fill(), name="pool")

    async def close(self) -> None:
        """Ends the pool and its sandboxes. Never raises."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while self._ready:
            self._remove(self._ready.popleft())
        await asyncio.gather(*self._removing)

    def take(self) -> Sandbox | None:
        """A ready sandbox that is now the caller's, or None."""
        while self._ready:
            sandbox = self._ready.popleft()
            self._taken = True
            self._changed.set()
            if sandbox.connected:
                sandbox.on_lost = None
                return sandbox
            self._remove(sandbox)
        return None

    async def give_way(self) -> Sandbox | None:
        """Makes room for one sandbox when the cap is reached: hands one over, or returns None when there is room."""
        while self.count > max(self._room(), 0):  # an empty pool stands in nobody's way, however many wait
            if (sandbox := self.take()) is not None:
                return sandbox
            if self._removing:
                await asyncio.wait(self._removing, return_when=asyncio.FIRST_COMPLETED)
            elif self._launching is not None:
                self._arrived.clear()
                self._awaited += 1
                try:
                    await self._arrived.wait()
                finally:
                    self._awaited -= 1
        return None

    def notice(self) -> None:
        """The room may have changed."""
        self._changed.set()

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _fill(self) -> None:
        while True:
            self._changed.clear()
            if len(self._ready) >= self._size or self.count >= self._room():
                while self._ready and not self._awaited and self.count > max(self._room(), 0):
                    self._remove(self._ready.popleft())
                await self._changed.wait()
                continue
            if self._taken:
                self._taken = False
                await asyncio.sleep(REFILL_S)
                continue
            try:
                self._ready.append(await self._launch())
            except Exception as error:  # noqa: BLE001  # whatever goes wrong with one, the pool tries the next
                self._observer.failed("pool", error)
                self._launching = None
                self._arrived.set()
                await self._clock.sleep(RETRY_S)
            finally:
                self._launching = None
                self._arrived.set()

    async def _launch(self) -> Sandbox:
        name = f"p-{secrets.token_hex(12)}"
        self._launching = name
        handle = await self._engine.launch(name, self._spec, name)
        sandbox = self._launching = Sandbox(self._engine, handle)
        try:
            await self._until_ready(sandbox)
        except BaseException:
            self._remove(sandbox)
            raise
        sandbox.on_lost = lambda: self._drop(sandbox)
        return sandbox

    async def _until_ready(self, sandbox: Sandbox) -> None:
        client = await sandbox.client()
        waited = 0.0
        while (await client.status()).get("state") == "starting":
            if waited > READY_S:
                raise ChannelStalled("a pooled sandbox's interpreter did not become ready in time")
            await self._clock.sleep(POLL_S)
            waited += POLL_S

    def _drop(self, sandbox: Sandbox) -> None:
        if sandbox in self._ready:
            self._ready.remove(sandbox)
            self._remove(sandbox)

    def _remove(self, sandbox: Sandbox) -> None:
        task = asyncio.create_task(self._destroy(sandbox), name="pool-remove")
        self._removing.add(task)
        task.add_done_callback(self._removed)

    def _removed(self, task: asyncio.Task[None]) -> None:
        self._removing.discard(task)
        self._changed.set()

    async def _destroy(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.destroy()
        except SandboxError as error:  # the sweep for orphans finds it again
            self._observer.failed("destroy", error)
