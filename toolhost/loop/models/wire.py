"""HTTP for the adapters: one POST, answered as JSON or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from toolhost.loop.errors import ModelError, RequestError

_MAX_EVENT_BYTES = 16 * 1024 * 1024
_CONNECT_SECONDS = 10.0


class Wire:
    """A model server's address. `timeout` in seconds is between two bytes of an answer.

    Raises RequestError for an address that no request could be sent to.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout: float) -> None:
        self._base = _address(base_url)
        self._client = httpx2.AsyncClient(
            headers=dict(headers), timeout=httpx2.Timeout(timeout, connect=_CONNECT_SECONDS)
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer as an object. Raises ModelError."""
        async with self._post(path, body) as response:
            return _parse(await response.aread())

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The data of each event, until the stream ends or says `[DONE]`. Raises ModelError."""
        async with self._post(path, body) as response:
            source = httpx2.EventSource(response, max_event_size=_MAX_EVENT_BYTES)
            async for event in source:
                if event.data.strip() == "[DONE]":
                    return
                if event.data:
                    yield _parse(event.data)

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx2.Response]:
        try:
            async with self._client.stream("POST", f"{self._base}{path}", json=dict(body)) as response:
                if response.status_code >= 400:
                    raise _refused(response.status_code, await response.aread())
                yield response
        except httpx2.TimeoutException as error:
            raise ModelError(f"the model server at {self._base} did not answer in time") from error
        except httpx2.HTTPError as error:
            detail = str(error) or type(error).__name__
            raise ModelError(f"the connection to the model server at {self._base} failed: {detail}") from error


def _address(base_url: str) -> str:
    try:
        url = httpx2.URL(base_url)
        usable = url.scheme in ("http", "https") and bool(url.host) and (url.port is None or 0 < url.port < 65536)
    except (httpx2.InvalidURL, ValueError):
        usable = False
    if not usable or not base_url.isprintable() or " " in base_url:
        raise RequestError(f"the model server's address must be like http://HOST:PORT/v1, not {base_url!r}", "model")
    return base_url.rstrip("/")


def _parse(data: str | bytes) -> dict[str, Any]:
    try:
        value = _loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError("the model server sent something that is not JSON") from error
    if not isinstance(value, dict):
        raise ModelError("the model server sent JSON that is not an object")
    if isinstance(value.get("error"), (dict, str)) and "choices" not in value and value.get("object") != "response":
        raise ModelError(f"the model server reported an error: {_message(value)}")
    return value


def _loads(data: str | bytes) -> Any:
    """JSON, with U+FFFD for what is no character: half of a surrogate pair could be neither sent on nor kept."""
    text = data.decode("utf-8-sig", "replace") if isinstance(data, bytes) else data
    value = json.loads(text)
    if "\\u" not in text or (plain := json.dumps(value, ensure_ascii=False)).isascii():
        return value
    return json.loads(plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def _refused(status: int, body: bytes) -> ModelError:
    try:
        detail = _message(_loads(body))
    except (ValueError, RecursionError):
        detail = body[:200].decode("utf-8", "replace")
    code = {400: "invalid_prompt", 422: "invalid_prompt", 429: "rate_limit_exceeded"}.get(status, "server_error")
    return ModelError(f"the model server answered {status}: {detail}", code, status)


def _message(value: Any) -> str:
    error = value.get("error", value) if isinstance(value, dict) else value
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:500]
