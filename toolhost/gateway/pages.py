"""Lists in the API's form: `after`, `limit`, `order`. Pure.

Above: routes. Below: `errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolhost.gateway.errors import bad_request
from toolhost.gateway.records import Item

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of items, which are given oldest first. Raises ApiError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc", "order", "invalid_value")
    limit = number(query, "limit", DEFAULT_LIMIT)
    if not 1 <= limit <= MAX_LIMIT:
        raise bad_request(f"limit must be between 1 and {MAX_LIMIT}", "limit", "invalid_value")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise bad_request(f"after: no item with id '{after[:128]}' in this list", "after", "invalid_value")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(ordered) > limit,
    }


def number(query: Mapping[str, str], name: str, default: int) -> int:
    """A whole number of the query. Raises ApiError."""
    text = query.get(name)
    if text is None or text == "":
        return default
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 12:
        raise bad_request(f"{name} must be a whole number", name, "invalid_value")
    return int(text)
