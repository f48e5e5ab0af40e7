"""The browser namespace: search, open and find over the session's own stack of pages. It needs no sandbox.

Above: `mcp_server`, through the registry. Below: `browsing`, `prompts`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toolhost.browsing.errors import BrowserError
from toolhost.browsing.service import BrowserService
from toolhost.browsing.session import RESOURCE, BrowserSession
from toolhost.identity import label
from toolhost.namespaces import prompts
from toolhost.namespaces.base import CLEANUP, CallContext, Tool, ToolResult, cleanup

log = logging.getLogger("toolhost.browser")

BROWSER_ERROR = "browser_error"


class BrowserNamespace:
    """See `base.Namespace` and `base.Opened`."""

    name = "browser"

    def __init__(self, service: BrowserService, *, instructions: str | None = None) -> None:
        self._service = service
        texts = prompts.browser_texts()
        self.instructions = texts.instructions if instructions is None else instructions
        self.tools: Sequence[Tool] = (*texts.tools, CLEANUP)

    async def open(self) -> None:
        await self._service.open()

    async def close(self) -> None:
        await self._service.close()

    async def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        if name == CLEANUP.name:
            return await cleanup(context)
        attachment = context.attachment
        session = await attachment.resource(RESOURCE, BrowserSession)
        assert isinstance(session, BrowserSession)
        began = time.monotonic()
        try:
            text = await session.call(
                lambda stack: self._service.browser(stack, context.domains),
                name,
                arguments,
                lambda: attachment.save(RESOURCE),
            )
        except BrowserError as error:
            return ToolResult(str(error), is_error=True, meta={"toolhost/error": BROWSER_ERROR})
        if log.isEnabledFor(logging.DEBUG):
            fields = {
                "session": label(attachment.key),
                "tool": name,
                "stored_bytes": session.committed_bytes,
                "ms": round((time.monotonic() - began) * 1000, 2),
            }
            log.debug("browser call", extra={"fields": fields})
        return ToolResult(text)
