"""The client's end of MCP over Server-Sent Events, with what the SDK's own lacks.

That one breaks the connection at a message above 1 MiB (a figure is enough), and when a POST is refused it drops the
error, so that the caller waits for ever. Here a message may have `MAX_EVENT_BYTES`, and a refused POST is the call's
error. Above: `tool_client`. Below: httpx2.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urljoin

import anyio
import httpx2
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from toolhost.loop.errors import ToolServerGone

MAX_EVENT_BYTES = 64 * 1024 * 1024
SESSION_UNKNOWN = "Session terminated"
"""The SDK's words for a server that no longer knows a session, and so did not take the request."""

LIMITS = httpx2.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=3.0)
"""As httpx2's own, but that a quiet connection is given up before servers on uvicorn do (both 5 s): else a call meets
its end, and nobody knows whether it was taken."""

Incoming = SessionMessage | Exception


@asynccontextmanager
async def sse_streams(
    url: str, headers: Mapping[str, str], connect_seconds: float, read_seconds: float
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]]:
    """A connection's streams for an MCP session. Times are seconds: to connect and post, and between two events.

    Raises ToolServerGone, httpx2.HTTPError or ValueError while connecting. The read stream ends with the connection.
    """
    timeout = httpx2.Timeout(connect_seconds, read=read_seconds)
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=timeout, limits=LIMITS) as http,
        http.stream("GET", url, headers={"accept": "text/event-stream"}) as response,
    ):
        if response.is_redirect:
            raise ToolServerGone(f"the server redirects to {response.headers.get('location')!r}: give that address")
        response.raise_for_status()
        events = aiter(httpx2.EventSource(response, max_event_size=MAX_EVENT_BYTES))
        post_url = await _endpoint(url, events)
        inbox, reader = anyio.create_memory_object_stream[Incoming](0)
        writer, outbox = anyio.create_memory_object_stream[SessionMessage](0)
        async with reader, writer, anyio.create_task_group() as group:
            group.start_soon(_read, events, inbox)
            group.start_soon(_write, http, post_url, connect_seconds, outbox, inbox)
            yield reader, writer
            group.cancel_scope.cancel()


async def _endpoint(url: str, events: AsyncIterator[httpx2.ServerSentEvent]) -> str:
    """Where to post: the first event says it. Another origin would be given the credentials, so it is refused."""
    async for event in events:
        if event.event == "endpoint":
            target = urljoin(url, event.data)
            one, other = httpx2.URL(url), httpx2.URL(target)
            if (one.scheme, one.host, one.port) != (other.scheme, other.host, other.port):
                raise ToolServerGone("the server wants its messages posted to another origin")
            return target
    raise ToolServerGone("the server said nothing of where to post")


async def _read(events: AsyncIterator[httpx2.ServerSentEvent], inbox: MemoryObjectSendStream[Incoming]) -> None:
    """Messages from the stream, until it ends or breaks: either way the session is told by the end of `inbox`."""
    async with inbox:
        try:
            async for event in events:
                if event.event != "message" or not event.data:
                    continue
                try:
                    message = types.jsonrpc_message_adapter.validate_json(event.data, by_name=False)
                except ValidationError as error:
                    await inbox.send(error)
                    continue
                await inbox.send(SessionMessage(message))
        except (httpx2.HTTPError, httpx2.SSEError, httpx2.StreamError) as error:
            await inbox.send(error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the session has been left


async def _write(
    http: httpx2.AsyncClient,
    url: str,
    seconds: float,
    outbox: MemoryObjectReceiveStream[SessionMessage],
    inbox: MemoryObjectSendStream[Incoming],
) -> None:
    """Messages to the server. `inbox` is the reader's to close: held open here, it would hide a stream's end."""
    async with outbox:
        async for message in outbox:
            error = await _post(http, url, seconds, message.message)
            if error is None or not isinstance(message.message, types.JSONRPCRequest):
                continue
            refusal = types.JSONRPCError(jsonrpc="2.0", id=message.message.id, error=error)
            try:
                await inbox.send(SessionMessage(refusal))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


async def _post(http: httpx2.AsyncClient, url: str, seconds: float, message: Any) -> types.ErrorData | None:
    """Post a message; what the request's answer is if the server did not take it, or may not have."""
    body = message.model_dump(by_alias=True, mode="json", exclude_unset=True)
    try:
        response = await http.post(url, json=body, timeout=seconds)
    except httpx2.ConnectError as error:
        return types.ErrorData(code=types.INVALID_REQUEST, message=SESSION_UNKNOWN, data=str(error))
    except httpx2.HTTPError as error:
        return types.ErrorData(code=types.CONNECTION_CLOSED, message=str(error) or type(error).__name__)
    if response.is_success:
        return None
    if response.status_code == 404:
        return types.ErrorData(code=types.INVALID_REQUEST, message=SESSION_UNKNOWN)
    code = types.CONNECTION_CLOSED if response.is_server_error else types.INVALID_REQUEST
    return types.ErrorData(code=code, message=f"the tool server answered {response.status_code}")
