"""The contract of a namespace: what it is called, what it tells the model, its tools, and a call.

Above: `mcp_server`. Below: each namespace, over sandboxes' public API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sandboxes.events import OnEvent
from sandboxes.resources import Resource, ResourceFactory
from sandboxes.spec import Execution, Outcome, SessionKey
from toolhost.identity import NOT_NARROWED, Domains


class SessionAttachment(Protocol):
    """What one client connection may do with its session (`sandboxes.manager.Attachment` is one)."""

    @property
    def key(self) -> SessionKey: ...

    async def run(self, execution: Execution, on_event: OnEvent | None = None) -> Outcome:
        """Raises SandboxError; never for what the code did. Cancelling it ends the running code."""
        ...

    async def read_file(self, path: str, max_bytes: int) -> bytes: ...

    async def resource(self, name: str, factory: ResourceFactory) -> Resource: ...

    async def save(self, name: str) -> None: ...

    async def cleanup(self) -> None: ...

    async def gone(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool as a client lists it. `input_schema` is flat, and every `anyOf` branch in it has a `type`.

    `hidden`: kept out of the model's prompt by clients that render tools there. `attempts`: a call that names an
    attempt runs once however often it is sent (`_meta` key `toolhost/attempt-id`), so a client may send it again.
    """

    name: str
    description: str
    input_schema: Mapping[str, Any]
    title: str = ""
    hidden: bool = False
    attempts: bool = False
    hints: Mapping[str, bool] = field(default_factory=dict)  # MCP's readOnlyHint and so on


@dataclass(frozen=True, slots=True)
class Image:
    data: bytes
    mime: str


@dataclass(frozen=True, slots=True)
class Link:
    """A file in the session that a client may fetch."""

    uri: str
    name: str
    mime: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answers. `text` is never empty; the rest is for clients that take more than text."""

    text: str
    is_error: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Image] = ()
    links: Sequence[Link] = ()
    structured: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CallContext:
    """What surrounds a call. `meta`: its `_meta`, untrusted. `rich`: the client takes more than text. `domains`: what
    the connection narrows a browser to."""

    attachment: SessionAttachment
    meta: Mapping[str, Any]
    rich: bool = False
    on_event: Callable[..., None] | None = None
    domains: Domains = NOT_NARROWED


class Namespace(Protocol):
    """Called by `mcp_server`. Stateless: what lasts is in the session."""

    name: str
    instructions: str
    tools: Sequence[Tool]

    async def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        """Runs a tool of this namespace. Raises BadArguments and SandboxError, which become text."""
        ...


@runtime_checkable
class Opened(Protocol):
    """A namespace that holds something for the whole host. The composition root opens it and closes it, once."""

    async def open(self) -> None:
        """Before the first call. Raises ConfigurationError."""

    async def close(self) -> None:
        """After the last call. Never raises."""


CLEANUP = Tool(
    name="cleanup_session",
    description="Ends this connection's use of its session. Clients call it when a response is complete.",
    input_schema={"type": "object", "properties": {}},
    title="End the session",
    hidden=True,
    hints={"readOnlyHint": False, "idempotentHint": True, "openWorldHint": False},
)


async def cleanup(context: CallContext) -> ToolResult:
    """The `cleanup_session` of every namespace: idempotent, and it returns at once."""
    await context.attachment.cleanup()
    return ToolResult("Session cleaned up.")
