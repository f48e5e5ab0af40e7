"""A run's sessions with its tool servers: one a namespace, opened on first use, cleaned up at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from toolhost.loop.errors import ToolError, ToolServerGone
from toolhost.loop.results import ToolResult, read_result
from toolhost.loop.tools import CLEANUP_TOOL, AttemptSession, ToolServer

_CLEANUP_SECONDS = 5.0
_CONNECTION_CLOSED = -32000
"""The code by which MCP clients say that the connection closed while a call was running."""


class SessionKeeper:
    """One namespace's session. It is entered and left by one task of its own, as MCP clients require.

    `lock` keeps the calls of one session in order (it is first come, first served).
    """

    def __init__(self, server: ToolServer, namespace: str, session_id: str, headers: Mapping[str, str]) -> None:
        self.lock = asyncio.Lock()
        self._server = server
        self._namespace = namespace
        self._session_id = session_id
        self._headers = dict(headers)
        self._opening = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._session: Any = None

    async def call(self, name: str, args: dict[str, Any], attempt: str) -> ToolResult:
        """Call a tool. Raises ToolError (it was not done) or ToolServerGone (nobody knows whether it was)."""
        try:
            session = await self._open()
        except Exception as error:
            raise ToolError(f"the tool server of {self._namespace!r} cannot be reached: {error}") from error
        try:
            if isinstance(session, AttemptSession):
                return read_result(await session.call_attempt(name, args, attempt))
            return read_result(await session.call_tool(name, args))
        except ToolError as error:
            if isinstance(error, ToolServerGone) and not isinstance(session, AttemptSession):
                self._session = None  # ours connects again by itself
            raise
        except Exception as error:
            code = getattr(error, "code", None) or getattr(getattr(error, "error", None), "code", None)
            if isinstance(code, int) and code != _CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            self._session = None  # the next call opens another one under the same key
            raise ToolServerGone(f"the connection to {self._namespace!r} broke: {error}") from error

    async def close(self) -> None:
        """Clean up the host's session and leave ours, within bounded time."""
        self._leave.set()
        if self._task is None:
            return
        _, pending = await asyncio.wait({self._task}, timeout=3 * _CLEANUP_SECONDS)
        for task in pending:
            task.cancel()
            await asyncio.wait({task}, timeout=_CLEANUP_SECONDS)

    async def _open(self) -> Any:
        async with self._opening:
            if self._session is not None:
                return self._session
            await self._leave_old()
            self._leave = asyncio.Event()
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            ready.add_done_callback(_retrieve)
            self._task = asyncio.create_task(self._keep(ready, self._leave))
            self._session = await asyncio.shield(ready)
            return self._session

    async def _leave_old(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLEANUP_SECONDS)

    async def _keep(self, ready: asyncio.Future[Any], leave: asyncio.Event) -> None:
        try:
            async with self._server.new_session(self._namespace, self._session_id, self._headers or None) as session:
                ready.set_result(session)
                await leave.wait()
                await _clean_up(session)
        except Exception as error:  # noqa: BLE001 - a broken session must not take the run with it
            if not ready.done():
                ready.set_exception(error)
        finally:
            if self._task is asyncio.current_task():
                self._session = None
            if not ready.done():
                ready.cancel()


def _retrieve(ready: asyncio.Future[Any]) -> None:
    """Look at a future's error, also when whoever waited for it has gone."""
    if not ready.cancelled():
        ready.exception()


async def _clean_up(session: Any) -> None:
    """Tell the host; it answers at once, and an error here would help nobody."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLEANUP_SECONDS):
            await session.call_tool(CLEANUP_TOOL, {})
