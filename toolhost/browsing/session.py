"""A session's stack of pages as a resource of that session: one call at a time, what it added committed after it.

Above it: the browser namespace; the session manager, which keeps it. Below it: `state`, `browser`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from toolhost.browsing.browser import Browser
from toolhost.browsing.state import BrowserState

log = logging.getLogger("toolhost.browser")

RESOURCE = "browser"

Save = Callable[[], Awaitable[None]]
"""Commits `BrowserSession.changes()`. What it raises is logged: the next call commits again."""


class BrowserSession:
    """See `sandboxes.resources.Resource`. `stored`: the parts that an earlier process committed."""

    def __init__(self, stored: Mapping[str, bytes]) -> None:
        self._stored: Mapping[str, bytes] | None = stored
        self.committed_bytes = 0
        """By the last commit."""
        self._damaged: set[str] = set()
        self._changes: Mapping[str, bytes | None] = {}
        self._stack: BrowserState | None = None
        self._turn = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None

    def changes(self) -> Mapping[str, bytes | None]:
        """The parts that the call which commits now has added, packed off the event loop."""
        return self._changes

    async def close(self) -> None:
        """Waits for a commit that is under way."""
        await self._saved()

    async def call(
        self, browser: Callable[[BrowserState], Browser], tool: str, arguments: Mapping[str, object], save: Save
    ) -> str:
        """Runs one call when those before it are done, and commits what it pushed before it returns.

        A call that is cancelled while it commits has happened. Raises BrowserError, with the result text.
        """
        async with self._turn:
            await self._saved()
            stack = await self._loaded()
            text = await browser(stack).call(tool, arguments)
            self._saving = asyncio.create_task(self._save(stack, save), name="save-browser")
            await asyncio.shield(self._saving)
            return text

    async def _loaded(self) -> BrowserState:
        if self._stack is None:
            # Only once all of it is there: a call that is cancelled here must not leave an empty stack behind.
            self._stack = await self._restored()
            self._stored = None
        return self._stack

    async def _restored(self) -> BrowserState:
        if not self._stored:
            return BrowserState()
        try:
            return await asyncio.to_thread(BrowserState.from_parts, self._stored)
        except ValueError as error:
            log.warning("a stored browser state cannot be read, so the session begins anew: %s", error)
            self._damaged = set(self._stored)
            return BrowserState()

    async def _save(self, stack: BrowserState, save: Save) -> None:
        try:
            unsaved = await asyncio.to_thread(stack.unsaved)
            self._changes = {**dict.fromkeys(self._damaged), **unsaved}
            await save()
            stack.saved()
            self._damaged.clear()
            self.committed_bytes = sum(len(part) for part in unsaved.values() if part is not None)
        except Exception:  # whatever the store raises: the page was shown and must not be lost with it
            log.exception("a browser state could not be committed; the next call tries again")
        finally:
            self._changes = {}

    async def _saved(self) -> None:
        """The stack must not change while a thread reads it."""
        if self._saving is not None:
            await asyncio.wait((self._saving,))
