"""What transports share: ASGI types and short answers, without request or response objects on the way of a call.

Above: transports, `app`. Below: `errors`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from sandboxes.spec import SessionRequest
from toolhost.errors import Refused
from toolhost.namespaces.base import SessionAttachment

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Attach = Callable[[SessionRequest], SessionAttachment]


async def respond(send: Send, status: int, text: str, headers: Iterable[tuple[str, str]] = ()) -> None:
    """A short plain-text answer."""
    body = text.encode()
    lines = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    lines += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def accept(send: Send) -> None:
    """202 and no more: a body would be one more write for every call, and its type one more header to look at."""
    await send({"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def respond_json(send: Send, status: int, value: object, headers: Iterable[tuple[str, str]] = ()) -> None:
    """A short JSON answer."""
    body = json.dumps(value).encode()
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    lines += [(name.encode("latin-1"), text.encode("latin-1")) for name, text in headers]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, refused: Refused) -> None:
    await respond(send, refused.status, f"{refused.message}\n", refused.headers)


def address_of(scope: Scope) -> str:
    """The peer's address, "" when the server does not know it."""
    client = scope.get("client")
    return str(client[0]) if client else ""
