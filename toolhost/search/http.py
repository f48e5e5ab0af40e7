"""JSON over HTTP for providers: one session, capped answers, statuses as this package's errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from toolhost.search.base import Failure, SearchError
from toolhost.search.retry import RETRY_STATUS, Transient, retry_after_seconds

MAX_ANSWER = 8 * 1024 * 1024
_KEY_STATUS = frozenset({401, 403})
# 432 and 433 are Tavily's for a used-up plan.
_QUOTA_STATUS = frozenset({402, 432, 433})


def status_error(name: str, status: int, retry_after: str | None) -> Exception:
    """The error for an HTTP status that is not success."""
    if status in RETRY_STATUS or status >= 500:
        return Transient(f"{name} answered HTTP {status}", status=status, retry_after=retry_after_seconds(retry_after))
    if status in _KEY_STATUS:
        return SearchError(Failure.KEY, f"{name} refused the request (HTTP {status}); its key or settings are wrong")
    if status in _QUOTA_STATUS:
        return SearchError(Failure.QUOTA, f"the plan for {name} is used up (HTTP {status})")
    return SearchError(Failure.QUERY, f"{name} did not accept the query (HTTP {status})")


def entries(name: str, answer: object, *path: str) -> list[Mapping[str, Any]]:
    """The list of objects at `path` of an answer; absent means none.

    Raises:
        SearchError: something else is there.
    """
    value: object = answer
    for key in path:
        if not isinstance(value, Mapping):
            raise SearchError(Failure.ANSWER, f"{name} sent an answer of an unknown form")
        value = value.get(key)
        if value is None:
            return []
    if not isinstance(value, list):
        raise SearchError(Failure.ANSWER, f"{name} sent an answer of an unknown form")
    return [entry for entry in value if isinstance(entry, Mapping)]


def text_of(entry: Mapping[str, Any], *keys: str) -> str:
    """The first of `keys` that holds text, or an empty string."""
    for key in keys:
        value = entry.get(key)
        if isinstance(value, str) and value.strip():
            return value
    return ""


class JsonClient:
    """Requests to one service.

    Args:
        name: How errors call the service.
        base_url: Without a slash at its end.
    """

    def __init__(self, name: str, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, params: Mapping[str, str]) -> object:
        """GET and decode. Raises SearchError or Transient."""
        return await self._request("GET", path, params=params)

    async def post(self, path: str, body: Mapping[str, Any]) -> object:
        """POST JSON and decode. Raises SearchError or Transient."""
        return await self._request("POST", path, body=body)

    async def _request(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> object:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, cookie_jar=aiohttp.DummyCookieJar())
        try:
            async with self._session.request(
                method, self._base_url + path, params=params, json=body, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise status_error(self._name, response.status, response.headers.get("Retry-After"))
                data = await self._read(response)
        except (aiohttp.ClientError, OSError) as error:
            raise Transient(f"{self._name} cannot be reached: {type(error).__name__}") from error
        try:
            answer: object = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SearchError(Failure.ANSWER, f"{self._name} sent an answer that is not JSON") from error
        return answer

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts = []
        size = 0
        async for part in response.content.iter_chunked(65536):
            size += len(part)
            if size > MAX_ANSWER:
                raise SearchError(Failure.ANSWER, f"{self._name} sent more than {MAX_ANSWER} bytes")
            parts.append(part)
        return b"".join(parts)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
