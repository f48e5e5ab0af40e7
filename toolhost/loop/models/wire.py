"""HTTP for the adapters: one POST, answered as JSON or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from toolhost.loop.errors import ModelError, RequestError

_MAX_EVENT_BYTES = 16 * 1024 * 1024
_MAX_ERROR_BYTES = 64 * 1024
_MODEL_NOT_FOUND = "model_not_found"
_CONNECT_SECONDS = 10.0
_KEEP_SECONDS = 3.0
"""How long a connection is kept: less than uvicorn, and so vLLM, keeps it (5 s)."""
_TRIES = 3
_AGAIN_SECONDS = 0.02
_REST_SECONDS = 0.02
"""How long an answer may take from its last event to its last byte, for its connection to be used again."""


class Wire:
    """A model server's address. `timeout` in seconds is between two bytes of an answer.

    Raises RequestError for an address that no request could be sent to.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout: float) -> None:
        self._base = _address(base_url)
        self._headers = {**headers, "Content-Type": "application/json"}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer as an object. Raises ModelError."""
        async with self._post(path, body) as response:
            return _parse(await response.read())

    async def events(
        self, path: str, body: Mapping[str, Any], last: Collection[str] = ()
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The data of each event, until the stream ends, says `[DONE]`, or sent an event whose type is in `last`.

        What a server sends after that is no part of the answer, and it is not waited for. Raises ModelError.
        """
        async with self._post(path, body) as response:
            if response.content_type != "text/event-stream":
                raise ModelError(f"the model server streams {response.content_type}, not text/event-stream")
            reader = _EventReader()
            async for piece in response.content.iter_any():
                for data in reader.read(piece):
                    if data.strip() == b"[DONE]":
                        await _drained(response.content)
                        return
                    if not data:
                        continue
                    event = _parse(data)
                    yield event
                    if str(event.get("type")) in last:
                        await _drained(response.content)
                        return

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:  # here, for a session belongs to the event loop that it was made in
            self._session = aiohttp.ClientSession(
                # How many run at once is decided elsewhere.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=self._timeout,
                proxy=_proxy(URL(self._base)),
            )
        try:
            data = json.dumps(dict(body), separators=(",", ":"), allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise ModelError(f"the request cannot be written as JSON: {error}", "invalid_prompt") from error
        try:
            async with await self._send(self._session, f"{self._base}{path}", data) as response:
                if response.status >= 300:
                    raise _refused(response.status, await response.content.read(_MAX_ERROR_BYTES))
                yield response
        except TimeoutError as error:
            raise ModelError(f"the model server at {self._base} did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            detail = str(error) or type(error).__name__
            raise ModelError(f"the connection to the model server at {self._base} failed: {detail}") from error

    async def _send(self, session: aiohttp.ClientSession, url: str, data: bytes) -> aiohttp.ClientResponse:
        """The answer's head. A server may close a kept connection just when it is used: then once more, on another."""
        for left in reversed(range(_TRIES)):
            try:
                return await session.post(url, data=data, allow_redirects=False)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not left:
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)  # meanwhile the ends of other kept connections are noticed
        raise AssertionError("unreachable")


class _EventReader:
    """Bytes to the data of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    _LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def read(self, piece: bytes) -> Iterator[bytes]:
        """The events that this piece ends. Raises ModelError for one that is too large."""
        *lines, self._rest = self._LINE_END.split(self._rest + piece)
        for line in lines:
            if not line:
                if self._data:
                    data, self._data, self._size = b"\n".join(self._data), [], 0
                    yield data
            elif line.startswith(b"data"):
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
                    self._size += len(line)
        if self._size + len(self._rest) > _MAX_EVENT_BYTES:
            raise ModelError(f"the model server sent an event of more than {_MAX_EVENT_BYTES} bytes")


async def _drained(content: aiohttp.StreamReader) -> None:
    """Read the end of an answer, which is all that may come: a connection with unread bytes is not used again."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_REST_SECONDS):
            while await content.readany():
                pass


def _proxy(url: URL) -> str | None:
    """The proxy that the environment names for an address. Looked up once: aiohttp would do it for each request."""
    if proxy_bypass(url.host or ""):
        return None
    proxies = getproxies()
    return proxies.get(url.scheme) or proxies.get("all")


def _address(base_url: str) -> str:
    try:
        url = URL(base_url)
        usable = url.scheme in ("http", "https") and bool(url.host) and (url.port is None or 0 < url.port < 65536)
    except ValueError:
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


_REFUSALS = {400: "invalid_prompt", 413: "invalid_prompt", 422: "invalid_prompt", 429: "rate_limit_exceeded"}


def _refused(status: int, body: bytes) -> ModelError:
    try:
        answer = _loads(body)
        detail = _message(answer)
        code = _MODEL_NOT_FOUND if _lacks_model(status, answer) else _REFUSALS.get(status, "server_error")
    except (ValueError, RecursionError):
        detail, code = body[:200].decode("utf-8", "replace"), _REFUSALS.get(status, "server_error")
    return ModelError(f"the model server answered {status}: {detail}", code, status)


def _lacks_model(status: int, answer: Any) -> bool:
    """Whether it is the model that is not there, and not the path: servers say 404 of both."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if not isinstance(error, dict) or status not in (400, 404):
        return False
    return error.get("code") == _MODEL_NOT_FOUND or (status == 404 and "model" in str(error.get("message", "")).lower())


def _message(value: Any) -> str:
    error = value.get("error", value) if isinstance(value, dict) else value
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:500]
