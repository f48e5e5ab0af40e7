"""Files that code made, by the container they are in: /v1/containers/ID/files.

Above: `routes`. Below: `service`, `http`. What clients know is the container's id; the session behind it is the
gateway's secret. Where the files are is a `FileSource`: this host in the same process, or a tool host over HTTP.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from toolhost.auth import Authenticator
from toolhost.gateway.errors import not_found
from toolhost.gateway.http import Json, answering, principal_of
from toolhost.gateway.pages import page
from toolhost.gateway.records import container_key
from toolhost.gateway.sources import FileEntry, FileSource
from toolhost.gateway.stores.base import Store

FILE_PREFIX = "cfile_"


def routes(store: Store, source: FileSource, auth: Authenticator) -> list[Route]:
    endpoints = _Endpoints(store, source, auth)
    base = "/v1/containers/{id}/files"
    return [
        Route(base, answering(endpoints.listed), methods=["GET"]),
        Route(base + "/{file}", answering(endpoints.shown), methods=["GET"]),
        Route(base + "/{file}/content", answering(endpoints.content), methods=["GET"]),
    ]


class _Endpoints:
    def __init__(self, store: Store, source: FileSource, auth: Authenticator) -> None:
        self._store = store
        self._source = source
        self._auth = auth

    async def listed(self, request: Request) -> Response:
        principal, session = await self._session(request)
        files = await self._source.list(principal, session)
        shown = [_shown(request.path_params["id"], entry) for entry in sorted(files, key=lambda one: one.modified)]
        return Json(page(shown, request.query_params))

    async def shown(self, request: Request) -> Response:
        principal, session = await self._session(request)
        path = _path(request.path_params["file"])
        for entry in await self._source.list(principal, session):
            if entry.path == path:
                return Json(_shown(request.path_params["id"], entry))
        raise not_found("File", request.path_params["file"][:200])

    async def content(self, request: Request) -> Response:
        principal, session = await self._session(request)
        pieces = self._source.read(principal, session, _path(request.path_params["file"]))
        first = await anext(pieces, b"")  # what is wrong is known before the status goes out
        headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        return StreamingResponse(_rest(first, pieces), media_type="application/octet-stream", headers=headers)

    async def _session(self, request: Request) -> tuple[str, str]:
        principal, ident = principal_of(request, self._auth), request.path_params["id"][:128]
        row = await self._store.get(container_key(ident))
        if row is None or row.data["principal"] != principal:
            raise not_found("Container", ident)
        return principal, row.data["session"]


async def _rest(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async with aclosing(pieces) as rest:  # type: ignore[type-var]
        async for piece in rest:
            yield piece


def _shown(container: str, entry: FileEntry) -> dict[str, Any]:
    name = base64.urlsafe_b64encode(entry.path.encode("utf-8", "surrogateescape")).decode().rstrip("=")
    return {
        "id": f"{FILE_PREFIX}{name}",
        "object": "container.file",
        "container_id": container,
        "path": entry.path,
        "bytes": entry.size,
        "created_at": int(entry.modified),
        "source": "assistant",
    }


def _path(ident: str) -> str:
    """The path that a file's id stands for. Raises ApiError."""
    try:
        if not ident.startswith(FILE_PREFIX):
            raise ValueError
        name = ident.removeprefix(FILE_PREFIX)
        return base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        raise not_found("File", ident[:200]) from None
