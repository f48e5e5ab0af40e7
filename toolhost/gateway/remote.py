"""Remote MCP servers that a request names itself, as far as the operator allows.

Above: `service`. Below: `toolhost.loop.tool_client`. A URL is allowed by a prefix in the settings, compared by its
parsed scheme, host, port and path, so that nothing in its text can pretend to be another host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from yarl import URL

from toolhost.errors import ConfigurationError
from toolhost.gateway.errors import ApiError, bad_request
from toolhost.loop.errors import RequestError, ToolServerGone
from toolhost.loop.tool_client import Endpoint, McpToolServer


class RemoteServers:
    """See the module. `prefixes` as in `https://mcp.example.com/`."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        """Raises ConfigurationError for a prefix that is not a URL."""
        self._prefixes = [URL(prefix) for prefix in prefixes]
        for prefix in self._prefixes:
            if prefix.scheme not in ("http", "https") or not prefix.host:
                raise ConfigurationError(f"gateway.remote_servers: {str(prefix)!r} is not an http(s) URL")

    async def connect(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, McpToolServer]:
        """A tool server for each remote one that the tools name, by its label. Raises ApiError."""
        found: dict[str, McpToolServer] = {}
        for tool in tools:
            if tool.get("type") != "mcp" or not tool.get("server_url"):
                continue
            url, label = tool["server_url"], tool["server_label"]
            if not isinstance(url, str) or not self._allows(url):
                raise bad_request(
                    "tools: this server_url is not among those that the gateway may connect to "
                    "(gateway.remote_servers)",
                    "tools",
                    "server_not_allowed",
                )
            found[label] = await self._connect(tool, url, label)
        return found

    def _allows(self, text: str) -> bool:
        try:
            url = URL(text)
            asked = (url.scheme, url.host, url.port)
        except ValueError:
            return False
        if url.user is not None or ".." in url.path:
            return False
        return any(
            asked == (prefix.scheme, prefix.host, prefix.port) and _below(url.path, prefix.path)
            for prefix in self._prefixes
        )

    async def _connect(self, tool: Mapping[str, Any], url: str, label: str) -> McpToolServer:
        headers = dict(tool.get("headers") or {})
        if isinstance(tool.get("authorization"), str):
            headers["Authorization"] = f"Bearer {tool['authorization']}"
        transport = "sse" if URL(url).path.rstrip("/").endswith("/sse") else "http"
        try:
            return await McpToolServer.connect([Endpoint(url, transport, headers, label=label)])
        except (ToolServerGone, RequestError) as error:
            raise ApiError(
                424, f"the MCP server {label!r} cannot be used: {error}", param="tools", code="server_unavailable"
            ) from error


def _below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix if prefix.endswith("/") else f"{prefix}/")
