"""A session's files as MCP resources, without the SDK: what is listed, and what reading one answers.

Above: `mcp_server`. Below: sandboxes' public API. Listing and reading make no session where there is none.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from sandboxes.errors import SessionUnknown
from sandboxes.files import FileInfo, Listing
from toolhost.errors import BadArguments
from toolhost.namespaces.executions import mime_of, uri_of

ROOT = "/mnt/data"
READ_BYTES = 8 << 20  # of one resource; larger files are for the HTTP API
LISTED = 1000

TEMPLATE: dict[str, Any] = {
    "uriTemplate": f"file://{ROOT}/{{+path}}",
    "name": "file",
    "title": "A file of the session",
    "description": f"What calls of this session left below {ROOT}.",
}


class Files(Protocol):
    """What is needed of `sandboxes.files.SessionFiles`."""

    async def list(self, path: str = ".") -> Listing: ...

    def get(self, path: str, max_bytes: int) -> AsyncIterator[bytes]: ...


async def listing(files: Files) -> list[dict[str, Any]]:
    """The resources of a session, none before its first call. Raises SandboxError."""
    try:
        found = await files.list()
    except SessionUnknown:
        return []
    return [_resource(file) for file in found.files if file.kind == "file"][:LISTED]


async def read(files: Files, uri: str) -> list[dict[str, Any]]:
    """The contents of one resource: text where it is UTF-8, else base64. Raises BadArguments, SandboxError."""
    path = path_of(uri)
    data = b"".join([piece async for piece in files.get(path, READ_BYTES)])
    contents: dict[str, Any] = {"uri": uri, "mimeType": mime_of(path)}
    try:
        contents["text"] = data.decode("utf-8")
    except UnicodeDecodeError:
        contents["blob"] = base64.b64encode(data).decode()
    return [contents]


def path_of(uri: str) -> str:
    """The path in the sandbox that a resource URI names. Whether there is a file only the sandbox can say."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        parts = urlsplit("")
    path = unquote(parts.path)
    if parts.scheme != "file" or parts.netloc or not path.startswith(f"{ROOT}/") or "\0" in path:
        raise BadArguments(f"not a resource of this server: its URIs are file://{ROOT}/… as resources/list names them")
    return path


def _resource(file: FileInfo) -> dict[str, Any]:
    path = file.path if file.path.startswith("/") else f"{ROOT}/{file.path}"
    return {
        "uri": uri_of(path),
        "name": path.removeprefix(f"{ROOT}/"),
        "mimeType": mime_of(path),
        "size": file.size,
    }
