"""Fetching from the web, all of it hostile: guarded addresses, capped bodies, one deadline.

Above it: `loader.PageLoader`. Below it: `guard` (who may be connected to), `cache`, `search.retry`.
"""

from __future__ import annotations

import asyncio
import http
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from toolhost.browsing.cache import Response, ResponseCache, SingleFlight
from toolhost.browsing.errors import AddressRefused, FetchError
from toolhost.browsing.guard import Guard
from toolhost.browsing.resolve import SystemResolver
from toolhost.search.base import Filters
from toolhost.search.retry import RETRY_STATUS, RetryPolicy, Transient, retry_after_seconds, with_retries

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([^\s;\"']+)", re.IGNORECASE)
_ACCEPT = "text/html,application/xhtml+xml,application/pdf;q=0.9,text/*;q=0.9,application/json;q=0.8,*/*;q=0.5"


@dataclass(frozen=True)
class FetchLimits:
    """Bounds of one fetch.

    Attributes:
        seconds: From the first connection to the last byte, redirects and retries included.
        max_bytes: Of a body, counted after decompression.
        max_redirects: In a row.
        connections: Open at a time, in all.
        connections_per_host: Open at a time to one host.
        cache_bytes: Bodies kept for conditional requests.
    """

    seconds: float = 30.0
    max_bytes: int = 20 * 1024 * 1024
    max_redirects: int = 8
    connections: int = 64
    connections_per_host: int = 6
    cache_bytes: int = 64 * 1024 * 1024


class Fetcher:
    """Fetches over http and https. One for the whole host; sessions share connections and cache, never cookies.

    Args:
        guard: Which addresses and ports are permitted.
        user_agent: What it calls itself.
        proxy: A proxy for all requests. Then the proxy's address is what is connected to: it must be permitted by the
            guard, and keeping the proxy from inside addresses is the proxy's own task.
        resolver: How names are resolved; the system's way when None.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        limits: FetchLimits | None = None,
        retry: RetryPolicy | None = None,
        user_agent: str = "toolhost (text browser)",
        proxy: str | None = None,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._guard = guard
        self._limits = limits or FetchLimits()
        self._retry = retry or RetryPolicy()
        self._user_agent = user_agent
        self._proxy = proxy
        self._resolver = resolver
        self._cache = ResponseCache(self._limits.cache_bytes)
        self._flights: SingleFlight[Response] = SingleFlight()
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str, filters: Filters) -> Response:
        """The document at `url`, asked for anew (a kept copy is used only when the server says it still holds).

        Raises:
            FetchError: refused, failed, or too late; the text is the reason.
        """
        target = self._guard.check_url(url, filters)
        return await self._flights.run((str(target), filters), lambda: self._in_time(target, filters))

    async def _in_time(self, target: URL, filters: Filters) -> Response:
        deadline = asyncio.get_running_loop().time() + self._limits.seconds
        try:
            async with asyncio.timeout_at(deadline):
                return await with_retries(lambda: self._follow(target, filters), self._retry, deadline)
        except TimeoutError as error:
            raise FetchError(f"no complete answer within {self._limits.seconds:g} seconds") from error
        except Transient as error:
            raise FetchError(str(error)) from error

    async def _follow(self, target: URL, filters: Filters) -> Response:
        for _ in range(self._limits.max_redirects + 1):
            answer = await self._request(target)
            if isinstance(answer, Response):
                return answer
            target = self._guard.check_url(answer, filters)
        raise FetchError(f"more than {self._limits.max_redirects} redirects")

    async def _request(self, target: URL) -> Response | str:
        """One request: the document, or the absolute URL it redirects to."""
        kept = self._cache.get(str(target))
        headers: dict[str, str] = {}
        if kept is not None and kept.etag:
            headers["If-None-Match"] = kept.etag
        elif kept is not None and kept.last_modified:
            headers["If-Modified-Since"] = kept.last_modified
        try:
            async with self._client().get(
                target, headers=headers, allow_redirects=False, proxy=self._proxy
            ) as response:
                if response.status == 304 and kept is not None:
                    return kept
                return await self._answer(target, response)
        except aiohttp.ClientSSLError as error:
            raise FetchError(f"no secure connection to {target.host}: {_reason(error)}") from error
        except aiohttp.ClientConnectorError as error:
            refused = _refusal(error)
            if refused is not None:
                raise refused from error
            raise Transient(f"cannot connect to {target.host}: {_reason(error)}") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise Transient(f"the connection to {target.host} failed: {type(error).__name__}") from error
        except (aiohttp.ClientError, ValueError, zlib.error) as error:
            raise FetchError(f"the answer is not valid HTTP: {type(error).__name__}") from error

    async def _answer(self, target: URL, response: aiohttp.ClientResponse) -> Response | str:
        if response.status in _REDIRECTS and (location := response.headers.get("Location")):
            return urljoin(str(target), location.strip())
        if response.status in RETRY_STATUS:
            raise Transient(
                _status_text(response.status),
                status=response.status,
                retry_after=retry_after_seconds(response.headers.get("Retry-After")),
            )
        if not 200 <= response.status < 300:
            raise FetchError(_status_text(response.status))
        body, truncated = await _read_capped(response, self._limits.max_bytes)
        document = _described(str(target), response.headers, body)
        if truncated:
            return replace(document, truncated=True, etag=None, last_modified=None)
        self._cache.put(str(target), document)
        return document

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._limits.connections,
                    limit_per_host=self._limits.connections_per_host,
                    socket_factory=self._guard.socket_factory(),
                    resolver=self._resolver or SystemResolver(),
                    use_dns_cache=False,
                ),
                headers={"User-Agent": self._user_agent, "Accept": _ACCEPT, "Accept-Encoding": "gzip, deflate"},
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                trust_env=False,
                auto_decompress=False,
            )
        return self._session

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class _Inflater:
    """Undoes a content coding piece by piece, never giving more than asked for."""

    def __init__(self, coding: str) -> None:
        # 47 reads gzip and zlib headers alike; servers also send raw deflate under that name.
        self._plain = coding in ("", "identity")
        if not self._plain and coding not in ("gzip", "x-gzip", "deflate"):
            raise FetchError(f"the content coding `{coding[:40]}` is not known")
        self._inflate = zlib.decompressobj(47)
        self._first = coding == "deflate"

    def feed(self, data: bytes, room: int) -> bytes:
        """At most `room` bytes of what `data` and all before it decompress to."""
        if self._plain:
            return data[:room]
        try:
            made = self._inflate.decompress(data, room)
        except zlib.error:
            if not self._first:
                raise
            self._inflate = zlib.decompressobj(-15)
            made = self._inflate.decompress(data, room)
        self._first = False
        return made


async def _read_capped(response: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
    """The body, decompressed, up to `limit` bytes, and whether there was more."""
    inflater = _Inflater(response.headers.get("Content-Encoding", "").strip().lower())
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(65536):
        made = inflater.feed(part, limit + 1 - size)
        parts.append(made)
        size += len(made)
        if size > limit:
            return b"".join(parts)[:limit], True
    return b"".join(parts), False


def _described(url: str, headers: Mapping[str, str], body: bytes) -> Response:
    content_type = headers.get("Content-Type", "")
    charset = _CHARSET.search(content_type)
    return Response(
        url=url,
        content_type=content_type.partition(";")[0].strip().lower(),
        charset=charset.group(1) if charset else None,
        body=body,
        etag=headers.get("ETag"),
        last_modified=headers.get("Last-Modified"),
    )


def _refusal(error: BaseException) -> AddressRefused | None:
    """The guard's refusal inside a connector's error, should that be what it wraps."""
    seen: list[BaseException | None] = [error]
    for _ in range(10):
        current = seen.pop() if seen else None
        if current is None:
            break
        if isinstance(current, AddressRefused):
            return AddressRefused(str(current))
        seen += [current.__cause__, current.__context__, getattr(current, "os_error", None)]
        seen += list(getattr(current, "exceptions", ()))
        seen = [entry for entry in seen if entry is not None]
    return None


def _reason(error: Exception) -> str:
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    return getattr(inner, "verify_message", None) or getattr(inner, "strerror", None) or type(inner).__name__


def _status_text(status: int) -> str:
    try:
        return f"HTTP {status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return f"HTTP {status}"
