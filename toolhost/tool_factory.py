"""The host's namespaces as tool servers of the loop, in the same process: one for each principal.

Above: `services`, which gives the factory to the gateway. Below: namespaces, `identity`, sandboxes' public API. What a
client on the wire gets, a run here gets too: the same session rules, texts, attempts and images.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandboxes.errors import SandboxError
from sandboxes.files import Listing
from sandboxes.spec import KeyKind, SessionKey, SessionRequest
from toolhost.browsing.citations import resolve
from toolhost.browsing.errors import BrowserError
from toolhost.browsing.session import RESOURCE
from toolhost.browsing.state import BrowserState
from toolhost.config import Settings
from toolhost.errors import BadArguments, row, text_for
from toolhost.gateway.errors import ApiError
from toolhost.gateway.sources import FileEntry, Page
from toolhost.identity import Refusal, identify
from toolhost.loop import results
from toolhost.loop.tool_client import ATTEMPT_META_KEY, SESSION_HEADER, ToolDescription
from toolhost.loop.tools import ToolServer
from toolhost.namespaces.base import CallContext, Namespace, SessionAttachment, ToolResult

log = logging.getLogger("toolhost.calls")

Attach = Callable[[SessionRequest], SessionAttachment]


@dataclass(frozen=True, slots=True)
class Description:
    """A namespace, as the loop reads it."""

    description: str
    tools: list[ToolDescription]


@dataclass(frozen=True, slots=True)
class ToolFactory:
    """Makes the tool server of a principal."""

    namespaces: Mapping[str, Namespace]
    attach: Attach
    settings: Settings

    def __call__(self, principal: str) -> ToolServer:
        return HostTools(self, principal)


@dataclass(frozen=True, slots=True)
class HostTools:
    """See `toolhost.loop.tools.ToolServer`."""

    factory: ToolFactory
    principal: str

    def has_tool(self, name: str) -> bool:
        return name in self.factory.namespaces

    def get_tool_description(self, name: str, allowed_tools: list[str] | None = None) -> Description | None:
        namespace = self.factory.namespaces.get(name)
        if namespace is None:
            return None
        tools = [
            ToolDescription(
                tool.name, tool.description, dict(tool.input_schema), bool(tool.hints.get("readOnlyHint", False))
            )
            for tool in namespace.tools
            if not tool.hidden and (allowed_tools is None or tool.name in allowed_tools)
        ]
        return Description(namespace.instructions, tools)

    @asynccontextmanager
    async def new_session(
        self, name: str, session_id: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[HostSession]:
        """A session of a namespace. Raises KeyError for one that is not there."""
        namespace = self.factory.namespaces[name]
        lines = {SESSION_HEADER: session_id, **{key.lower(): value for key, value in (headers or {}).items()}}
        identity = identify(
            [(key.encode(), value.encode()) for key, value in lines.items()],
            principal=self.principal,
            settings=self.factory.settings,
            connection_id=secrets.token_hex(16),
        )
        if isinstance(identity.session, Refusal):
            yield HostSession(namespace, None, identity.session.text)
            return
        attachment = self.factory.attach(identity.session)
        try:
            yield HostSession(namespace, attachment)
        finally:
            await attachment.gone()


@dataclass
class HostSession:
    """One run's use of one namespace."""

    namespace: Namespace
    attachment: SessionAttachment | None
    refusal: str = ""
    _client_info: Any = field(default="toolhost, in process", repr=False)

    async def call_tool(self, name: str, args: dict[str, Any]) -> results.ToolResult:
        return await self._call(name, args, {})

    async def call_attempt(self, name: str, args: dict[str, Any], attempt: str) -> results.ToolResult:
        return await self._call(name, args, {ATTEMPT_META_KEY: attempt})

    async def _call(self, name: str, args: dict[str, Any], meta: Mapping[str, Any]) -> results.ToolResult:
        if self.attachment is None:
            return results.ToolResult(f"Error: {self.refusal}", is_error=True)
        try:
            found = await self.namespace.call(name, args, CallContext(self.attachment, meta, rich=True))
        except (SandboxError, BadArguments) as error:
            return results.ToolResult(text_for(error), is_error=True)
        except Exception as error:
            log.exception("a call failed for a reason that is not in the table of errors")
            return results.ToolResult(text_for(error), is_error=True)
        return _result(found)


class FileReader(Protocol):
    """What is needed of `sandboxes.files.SessionFiles`."""

    async def list(self, path: str = ".") -> Listing: ...

    def get(self, path: str, max_bytes: int) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """The files of this host's sessions, for the gateway (`toolhost.gateway.sources.FileSource`)."""

    files: Callable[[SessionKey], FileReader]
    settings: Settings

    async def list(self, principal: str, session: str) -> list[FileEntry]:
        try:
            found = await self.files(SessionKey(principal, KeyKind.RETAINED, session)).list()
        except SandboxError as error:
            raise _refused(error) from error
        return [FileEntry(entry.path, entry.size, entry.modified) for entry in found.files if entry.kind == "file"]

    async def read(self, principal: str, session: str, path: str) -> AsyncIterator[bytes]:
        limit = self.settings.server.max_file_bytes
        try:
            async for piece in self.files(SessionKey(principal, KeyKind.RETAINED, session)).get(path, limit):
                yield piece
        except SandboxError as error:
            raise _refused(error) from error


@dataclass(frozen=True, slots=True)
class OwnCitations:
    """What this host's sessions cite, for the gateway (`toolhost.gateway.sources.CitationSource`)."""

    resource_parts: Callable[[SessionKey, str], Awaitable[Mapping[str, bytes]]]

    async def cited(self, principal: str, session: str, citations: Sequence[str]) -> list[Page | None]:
        try:
            stored = await self.resource_parts(SessionKey(principal, KeyKind.RETAINED, session), RESOURCE)
        except SandboxError as error:
            raise _refused(error) from error
        return await asyncio.to_thread(_cited, stored, citations)


def _cited(stored: Mapping[str, bytes], citations: Sequence[str]) -> list[Page | None]:
    try:
        state = BrowserState.from_parts(stored) if stored else None
    except ValueError:
        state = None  # of another version
    return [None if state is None else _page(state, citation) for citation in citations]


def _page(state: BrowserState, citation: str) -> Page | None:
    try:
        found = resolve(state, citation)
    except BrowserError:
        return None
    return Page(found.url, found.title) if found.url else None


def _refused(error: SandboxError) -> ApiError:
    return ApiError(row(error).status, text_for(error), code=row(error).code)


def _result(found: ToolResult) -> results.ToolResult:
    images = tuple(f"data:{image.mime};base64,{base64.b64encode(image.data).decode()}" for image in found.images)
    receipt = found.meta.get(results.RECEIPT_META_KEY)
    text = found.text.encode("utf-8", "replace").decode("utf-8") or results.EMPTY
    return results.ToolResult(text, found.is_error, images, receipt if isinstance(receipt, Mapping) else {})
