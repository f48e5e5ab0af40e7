"""A backend with a deadline on every call, timed. What the manager and its parts hold in place of the backend.

Above: `manager`, `pool`, `adoption`, `reaper`, `sandbox`. Below: `backends.base`.
A backend has its own deadlines; these are the belt to its braces: nothing that hangs in a backend hangs a session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from sandboxes.backends.base import Backend, Channel, Status
from sandboxes.errors import EngineUnavailable
from sandboxes.observer import Observer
from sandboxes.spec import Handle, SandboxSpec, Usage

T = TypeVar("T")


class Engine:
    """Every method is the backend's, and may raise EngineUnavailable at its deadline."""

    def __init__(
        self, backend: Backend, observer: Observer, *, launch_s: float, destroy_s: float, engine_s: float
    ) -> None:
        self.backend = backend
        self._observer = observer
        self._launch_s = launch_s
        self._destroy_s = destroy_s
        self._engine_s = engine_s

    async def launch(self, key: str, spec: SandboxSpec, workspace: str) -> Handle:
        return await self._timed("launch", self._launch_s, self.backend.launch(key, spec, workspace))

    async def connect(self, handle: Handle) -> Channel:
        return await self._timed("connect", self._engine_s, self.backend.connect(handle))

    async def poll(self, handle: Handle) -> Status:
        return await self._timed("poll", self._engine_s, self.backend.poll(handle))

    async def usage(self, handle: Handle) -> Usage:
        return await self._timed("usage", self._engine_s, self.backend.usage(handle))

    async def destroy(self, handle: Handle, *, keep_workspace: bool = False) -> None:
        destroyed = self.backend.destroy(handle, keep_workspace=keep_workspace)
        await self._timed("destroy", self._destroy_s, destroyed)

    async def remove_workspace(self, workspace: str) -> None:
        await self._timed("remove_workspace", self._destroy_s, self.backend.remove_workspace(workspace))

    async def list_owned(self) -> Sequence[Handle]:
        return await self._timed("list_owned", self._engine_s, self.backend.list_owned())

    async def _timed(self, operation: str, deadline_s: float, call: Awaitable[T]) -> T:
        began = time.perf_counter()
        error = ""
        try:
            async with asyncio.timeout(deadline_s):
                return await call
        except TimeoutError:
            error = EngineUnavailable.__name__
            raise EngineUnavailable(
                f"the {self.backend.name} backend did not finish {operation} in {deadline_s:g} s"
            ) from None
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self._observer.engine_call(operation, time.perf_counter() - began, error)
