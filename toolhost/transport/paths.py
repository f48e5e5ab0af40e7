"""Where a URL path leads: which namespace, over which transport, in which session. Pure; no redirects.

Above: `app`. Below: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`namespace` is None for bare `/sse` and `/mcp`; `session` is what stands behind `/s/`."""

    transport: str  # "sse", "mcp" or "messages"
    namespace: str | None = None
    session: str | None = None
    connection: str | None = None


def local_path(path: str, prefix: str) -> str:
    """A path without the prefix of a proxy, whether the proxy took it off or not."""
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def parse(path: str) -> Endpoint | None:
    """The MCP endpoint that a local path names, None when it names none. Empty parts (`//`, a last `/`) are skipped."""
    parts = [part for part in path.split("/") if part]
    if len(parts) == 2 and parts[0] == MESSAGES:
        return Endpoint(MESSAGES, connection=parts[1])
    session = None
    if len(parts) >= 3 and parts[0] == "s":
        session, parts = unquote(parts[1]), parts[2:]
    if parts and parts[-1] in ("sse", "mcp") and len(parts) <= 2:
        return Endpoint(parts[-1], parts[0] if len(parts) == 2 else None, session)
    return None
