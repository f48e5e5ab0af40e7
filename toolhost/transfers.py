"""Files of a session over HTTP, streamed both ways and capped. Nothing here opens a path: the sandbox does.

Above: `files`, `admin`. Below: sandboxes' public API, `errors`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import asdict
from typing import Protocol
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sandboxes.files import Listing
from toolhost.errors import Refused


class Files(Protocol):
    """What is needed of `sandboxes.files.SessionFiles`."""

    async def list(self, path: str = ".") -> Listing: ...

    def get(self, path: str, max_bytes: int) -> AsyncIterator[bytes]: ...

    def tar(self, path: str, max_bytes: int) -> AsyncIterator[bytes]: ...

    async def put(self, path: str, pieces: AsyncIterable[bytes], max_bytes: int) -> int: ...

    async def remove(self, path: str) -> None: ...


async def listing(files: Files, request: Request) -> Response:
    """`?path=DIRECTORY`: everything in it, or as much as one answer holds and `complete` false."""
    found = await files.list(request.query_params.get("path", ""))
    return JSONResponse({"files": [asdict(entry) for entry in found.files], "complete": found.complete})


async def download(files: Files, path: str, max_bytes: int) -> Response:
    """One file, as bytes and nothing else: what user code made is never shown as a page."""
    name = path.rstrip("/").rpartition("/")[2]
    return await _streamed(files.get(path, max_bytes), "application/octet-stream", name)


async def archive(files: Files, request: Request, max_bytes: int) -> Response:
    """`?path=DIRECTORY`: a tar of it."""
    path = request.query_params.get("path", "")
    name = path.strip("/").rpartition("/")[2] or "data"
    return await _streamed(files.tar(path, max_bytes), "application/x-tar", f"{name}.tar")


async def upload(files: Files, path: str, request: Request, max_bytes: int) -> Response:
    """The request's body becomes the file. An earlier one of that name is replaced when the last byte has come."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    try:
        size = await files.put(path, _counted(request, max_bytes), max_bytes)
    except ClientDisconnect:
        raise Refused(400, "the upload ended before its last byte; nothing was changed") from None
    return JSONResponse({"path": path, "size": size}, 201)


async def remove(files: Files, path: str) -> Response:
    await files.remove(path)
    return Response(status_code=204)


async def _counted(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        yield piece


def _too_large(max_bytes: int) -> Refused:
    return Refused(413, f"at most {max_bytes} bytes are taken; see server.max_file_bytes")


async def _streamed(pieces: AsyncIterator[bytes], media_type: str, name: str) -> Response:
    first = await anext(pieces, b"")  # what is wrong is known before the status goes out

    async def content() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(content(), headers=_headers(name), media_type=media_type)


def _headers(name: str) -> Mapping[str, str]:
    return {
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name.encode('utf-8', 'replace'), safe='')}",
        "x-content-type-options": "nosniff",
        "cache-control": "no-store",
    }
