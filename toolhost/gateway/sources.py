"""Where the files of sessions are: a tool host over HTTP, or whatever else has them.

Above: `files` (routes), `service`. Below: HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import httpx2

from toolhost.gateway.errors import ApiError
from toolhost.loop.tool_client import Endpoint

HTTP_S = 60.0


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a session. `path` as code knows it, `size` in bytes, `modified` in seconds since 1970."""

    path: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class Page:
    """What a citation leads to."""

    url: str
    title: str


class CitationSource(Protocol):
    """Where the pages are that sessions have opened."""

    async def cited(self, principal: str, session: str, citations: Sequence[str]) -> list[Page | None]:
        """For each citation its page, None if there is none. Raises ApiError."""
        ...


class FileSource(Protocol):
    """Where sessions' files are. Both raise ApiError."""

    async def list(self, principal: str, session: str) -> list[FileEntry]:
        """The files of a session."""
        ...

    def read(self, principal: str, session: str, path: str) -> AsyncIterator[bytes]:
        """A file's bytes."""
        ...


class NoFiles:
    """The source where no tool host is known."""

    async def list(self, principal: str, session: str) -> list[FileEntry]:
        raise ApiError(404, "this gateway knows no tool host whose files it could give out")

    async def read(self, principal: str, session: str, path: str) -> AsyncIterator[bytes]:
        raise ApiError(404, "this gateway knows no tool host whose files it could give out")
        yield b""


class NoCitations:
    """The source where no browser is known."""

    async def cited(self, principal: str, session: str, citations: Sequence[str]) -> list[Page | None]:
        return [None for _ in citations]


class HostCitations:
    """The pages of a tool host's sessions, by its HTTP API. `base_url` is where its namespaces are below."""

    def __init__(self, base_url: str) -> None:
        self._base = base_url.rstrip("/")

    async def cited(self, principal: str, session: str, citations: Sequence[str]) -> list[Page | None]:
        url = f"{self._base}/v1/sessions/retained/{quote(session, safe='')}/citations"
        async with httpx2.AsyncClient(timeout=HTTP_S) as http:
            try:
                answer = await http.get(url, params={"citation": list(citations)})
            except httpx2.HTTPError as error:
                raise _unreachable(error) from error
        if answer.status_code == 404:  # the session has opened no pages
            return [None for _ in citations]
        _check(answer)
        try:
            return [_page(one) for one in answer.json()["citations"]]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ApiError(502, "the tool host answered with something else than citations") from error


class HostFiles:
    """The files of a tool host, by its HTTP API. `base_url` is where its namespaces are below."""

    def __init__(self, base_url: str) -> None:
        self._base = base_url.rstrip("/")

    async def list(self, principal: str, session: str) -> list[FileEntry]:
        async with httpx2.AsyncClient(timeout=HTTP_S) as http:
            try:
                answer = await http.get(self._url(session))
            except httpx2.HTTPError as error:
                raise _unreachable(error) from error
        _check(answer)
        try:
            return [
                FileEntry(str(entry["path"]), int(entry["size"]), float(entry["modified"]))
                for entry in answer.json()["files"]
                if entry["kind"] == "file"
            ]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ApiError(502, "the tool host answered with something else than files") from error

    async def read(self, principal: str, session: str, path: str) -> AsyncIterator[bytes]:
        try:
            async with (
                httpx2.AsyncClient(timeout=HTTP_S) as http,
                http.stream("GET", f"{self._url(session)}/{quote(path)}") as answer,
            ):
                _check(answer)
                async for piece in answer.aiter_bytes():
                    yield piece
        except httpx2.HTTPError as error:
            raise _unreachable(error) from error

    def _url(self, session: str) -> str:
        return f"{self._base}/v1/sessions/retained/{quote(session, safe='')}/files"


def source_for(tools: Sequence[str]) -> FileSource:
    """The tool host that has the namespace `python`, if there is one among the tools."""
    base = _host_of("python", tools)
    return NoFiles() if base is None else HostFiles(base)


def citations_for(tools: Sequence[str]) -> CitationSource:
    """The tool host that has the namespace `browser`, if there is one among the tools."""
    base = _host_of("browser", tools)
    return NoCitations() if base is None else HostCitations(base)


def _host_of(namespace: str, tools: Sequence[str]) -> str | None:
    for text in tools:
        url = httpx2.URL(Endpoint.parse(text).url)
        head, found, _ = url.path.rpartition(f"/{namespace}/")
        if found:
            return str(url.copy_with(path=head or "/"))
    return None


def _page(found: Mapping[str, Any]) -> Page | None:
    url = found.get("url")
    return Page(str(url), str(found.get("title") or "")) if url else None


def _check(answer: Any) -> None:
    status: int = answer.status_code
    if status == 404:
        raise ApiError(404, "the container has no such file, or it has expired", code="file_not_found")
    if status >= 400:
        raise ApiError(502, f"the tool host answered {status}")


def _unreachable(error: Exception) -> ApiError:
    return ApiError(502, f"the tool host cannot be reached: {type(error).__name__}")
