"""Items that clients send: checked, completed, and resolved to what the loop understands.

Above: `prepare`, conversation routes. Below: `sealing`, the store (for references). What is missing and can be filled
in (ids, status, type) is; what is wrong is a 400 that says which item.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from toolhost.gateway.errors import ApiError, bad_request
from toolhost.gateway.records import Item, item_key, response_key, turn_key
from toolhost.gateway.sealing import Sealer
from toolhost.gateway.stores.base import Store
from toolhost.loop.ids import IdSource
from toolhost.loop.transcript import UNKNOWN_LABEL

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "code_interpreter_call": "ci",
    "web_search_call": "ws",
}
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
    "mcp_call": ("server_label", "name", "arguments"),
    "mcp_approval_request": ("id", "server_label", "name", "arguments"),
    "mcp_approval_response": ("approval_request_id",),
    "mcp_list_tools": ("server_label",),
    "item_reference": ("id",),
}
_HAVE_STATUS = ("message", "function_call", "function_call_output", "code_interpreter_call", "web_search_call")
_ANSWERS = ("function_call_output", "mcp_approval_response")
ID_LENGTH = 128


def checked(items: Sequence[Mapping[str, Any]], ids: IdSource, where: str = "input") -> list[Item]:
    """Items with type, id and status, each in a shape that the loop can read. Raises ApiError."""
    return [_checked(item, ids, f"{where}[{number}]", where) for number, item in enumerate(items)]


def _checked(item: Mapping[str, Any], ids: IdSource, place: str, where: str) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    fail = _failing(place, where)
    if kind == "item_reference":
        _texts(item, kind, fail)
        return dict(item)
    if kind not in _PREFIXES:
        if kind is None and set(item) == {"id"}:
            return _checked({"type": "item_reference", **item}, ids, place, where)
        raise fail(f"has the type {kind!r}, which is not supported" if kind else "has neither a type nor a role")
    _texts(item, kind, fail)
    ident = item.get("id")
    if ident is None:
        ident = ids.new(_PREFIXES[kind])
    elif not isinstance(ident, str) or not 0 < len(ident) <= ID_LENGTH:
        raise fail(f"has an id that is not a text of 1 to {ID_LENGTH} characters")
    result = {**item, "type": kind, "id": ident}
    if kind in _HAVE_STATUS and not isinstance(item.get("status"), str):
        result["status"] = "completed"
    match kind:
        case "message":
            result["content"] = _message(item, fail)
        case "function_call_output":
            if not isinstance(item.get("output"), str):
                _parts(item.get("output"), fail, "output")
        case "mcp_approval_response":
            if not isinstance(item.get("approve"), bool):
                raise fail("needs `approve`, true or false")
        case "code_interpreter_call":
            if not isinstance(item.get("code") or "", str):
                raise fail("needs `code` as text")
            result.setdefault("container_id", "")
            result["outputs"] = _outputs(item.get("outputs"), fail)
        case "mcp_call":
            _mcp_call(item, fail)
        case "reasoning":
            result.setdefault("summary", [])
            _parts(item.get("content") or [], fail, "content")
            if not isinstance(item.get("encrypted_content") or "", str):
                raise fail("needs `encrypted_content` as text")
    return result


Fail = Callable[[str], ApiError]


def _failing(place: str, where: str) -> Fail:
    return lambda what: bad_request(f"{place} {what}", where, "invalid_value")


def _texts(item: Mapping[str, Any], kind: str, fail: Fail) -> None:
    for name in _TEXTS.get(kind, ()):
        if not isinstance(item.get(name), str) or not item[name]:
            if name == "arguments" and item.get(name) == "":
                continue
            raise fail(f"of type {kind} needs `{name}`, a text")


def _message(item: Mapping[str, Any], fail: Fail) -> list[dict[str, Any]]:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise fail(f"has the role {role!r}; roles are {', '.join(_ROLES)}")
    if isinstance(content, str):
        if role == "assistant":
            return [{"type": "output_text", "text": content, "annotations": []}]
        return [{"type": "input_text", "text": content}]
    return _parts(content, fail, "content")


def _parts(content: Any, fail: Fail, name: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise fail(f"needs `{name}`: a text, or a list of content parts")
    for part in content:
        match part.get("type"):
            case "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text":
                if not isinstance(part.get("text"), str):
                    raise fail(f"has a part of {name} whose `text` is not a text")
            case "refusal":
                if not isinstance(part.get("refusal"), str):
                    raise fail(f"has a part of {name} whose `refusal` is not a text")
            case "input_image":
                url = part.get("image_url")
                if not isinstance(url, str) or not url.startswith(("data:image/", "https://", "http://")):
                    raise fail("has an input_image without an `image_url` (http, https or data)")
            case other:
                raise fail(f"has content of type {other!r}, which is not supported")
    return [dict(part) for part in content]


def _outputs(outputs: Any, fail: Fail) -> list[dict[str, Any]] | None:
    if outputs is None:
        return None
    if not isinstance(outputs, list) or not all(
        isinstance(one, Mapping) and isinstance(one.get("logs", ""), str) for one in outputs
    ):
        raise fail("needs `outputs` as a list of logs and images")
    return [dict(one) for one in outputs]


def _mcp_call(item: Mapping[str, Any], fail: Fail) -> None:
    if not isinstance(item.get("output") or "", str):
        raise fail("needs `output` as text")
    error = item.get("error")
    if error is not None and not isinstance(error, str):
        content = error.get("content", []) if isinstance(error, Mapping) else None
        if not isinstance(content, list) or not all(
            isinstance(part, Mapping) and isinstance(part.get("text", ""), str) for part in content
        ):
            raise fail("needs `error` as a text or a typed error object")
    if item.get("server_label") == UNKNOWN_LABEL:
        return
    approval = item.get("approval_request_id")
    if approval is not None and not isinstance(approval, str):
        raise fail("needs `approval_request_id` as text")


async def resolved(items: Sequence[Item], principal: str, store: Store) -> list[Item]:
    """Items with references replaced by what they refer to. Raises ApiError for one that leads nowhere."""
    result: list[Item] = []
    for item in items:
        if item["type"] != "item_reference":
            result.append(item)
            continue
        found = await find_item(item["id"], principal, store)
        if found is None:
            raise bad_request(f"Item with id '{item['id']}' not found.", "input", "item_not_found")
        result.append(found)
    return result


async def find_item(ident: str, principal: str, store: Store) -> Item | None:
    """A stored item by its id, None if there is none of this principal's."""
    pointer = await store.get(item_key(ident)) if 0 < len(ident) <= ID_LENGTH else None
    if pointer is None or pointer.data["principal"] != principal:
        return None
    holder = pointer.data
    row = await store.get(response_key(holder["in"]) if holder["kind"] == "response" else turn_key(holder["in"]))
    if row is None:
        return None
    items = [
        *row.data.get("input", ()),
        *(row.data.get("response") or {}).get("output", ()),
        *row.data.get("client", ()),
    ]
    return next((item for item in items if item.get("id") == ident), None)


def once(
    fresh: Sequence[Item], history: Sequence[Item], here: Collection[str], deleted: Collection[str], ids: IdSource
) -> list[Item]:
    """New items without those that are there already: clients replay what they have of a chain or conversation.

    `here` are ids that were minted in the history's own responses, `deleted` those that a client took out. An id that
    comes again with something else in it is a client's own way of numbering: it gets another, so that ids stay unique.
    Outputs of calls and approvals are always kept: whoever they answer judges them.
    """
    known = {item["id"]: _said(item) for item in history if item.get("id")}
    result: list[Item] = []
    for item in fresh:
        ident, said = item["id"], _said(item)
        if ident in here or ident in known or ident in deleted:
            again = ident in here or known.get(ident) == said
            if again and item["type"] not in _ANSWERS:
                continue
            item = {**item, "id": ids.new(_PREFIXES[item["type"]])}
        known[item["id"]] = said
        result.append(item)
    return result


def _said(item: Item) -> tuple[str, ...]:
    """What tells an item from others with its id: its type, and of a message what is in it, in any of its forms."""
    kind, content = item["type"], item.get("content")
    if kind == "function_call":
        return kind, item["call_id"]
    if kind != "message":
        return (kind,)
    if isinstance(content, str):
        return kind, content
    return kind, *(str(part.get("text") or part.get("refusal") or part.get("image_url")) for part in content or ())


def for_model(items: Sequence[Item], principal: str, sealer: Sealer) -> list[Item]:
    """Items for the loop: reasoning that travelled sealed is opened. Raises ApiError."""
    result: list[Item] = []
    for item in items:
        if item["type"] == "reasoning" and item.get("encrypted_content"):
            result.append({**item, **sealer.open(principal, item["encrypted_content"])})
        elif item["type"] == "reasoning":
            result.append({key: value for key, value in item.items() if key != "replay"})
        else:
            result.append(item)
    return result
