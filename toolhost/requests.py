"""What the HTTP APIs read of a request, checked: bodies, queries, the peer's address.

Above: `admin`, `citations`, `files`. Below: `errors`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request

from toolhost.errors import Refused

MAX_BODY = 64 << 10
MAX_SECONDS = 366 * 86400.0


class _FileName(PathConvertor):
    regex = r"[\s\S]*"  # names are data: a newline may be in one


def know_file_names() -> None:
    """Makes `{name:file}` known to starlette's routes: a path with any character. Harmless when repeated."""
    register_url_convertor("file", _FileName())


def address_of(request: Request) -> str:
    """The peer's address, "" when the server does not know it."""
    return request.client.host if request.client else ""


async def values(request: Request, known: set[str]) -> Mapping[str, Any]:
    """The fields of a small JSON object; no body is an empty one. Raises Refused: 400, 413."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise Refused(413, f"at most {MAX_BODY} bytes are taken here")
    found = json_value(body) if body.strip() else {}
    if not isinstance(found, dict):
        raise Refused(400, "the body must be a JSON object")
    return _checked(found, known)


def json_value(body: bytes) -> object:
    """A body's JSON, all of whose texts can be sent back. Raises Refused 400."""
    try:
        found: object = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused(400, "the body has half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not valid JSON") from None
    return found


def query(request: Request, known: set[str]) -> Mapping[str, str]:
    """The parameters of the URL. Raises Refused for unknown ones: a mistyped filter must not match everything."""
    return _checked(dict(request.query_params), known)


def _checked(found: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    if unknown := sorted(set(found) - known):
        raise Refused(400, f"unknown field {unknown[0][:64]!r}; known: {', '.join(sorted(known))}")
    return found


def number(fields: Mapping[str, Any], name: str) -> float | None:
    """A positive number of seconds, None where it is not given. Raises Refused."""
    value = fields.get(name)
    if value is None:
        return None
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not 0 < found <= MAX_SECONDS:
        raise Refused(400, f"{name} must be a number of seconds above 0")
    return found


def text(fields: Mapping[str, Any], name: str) -> str | None:
    """A text, None where it is not given. Raises Refused."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise Refused(400, f"{name} must be a text")
    return value or None


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """True or false, also as `1` or `0` in a URL. Raises Refused."""
    value = fields.get(name, False)
    if isinstance(value, bool):
        return value
    if value in ("1", "true", "0", "false", ""):
        return value in ("1", "true")
    raise Refused(400, f"{name} must be true or false")
