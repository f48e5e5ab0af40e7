"""Chat Completions messages as items, for applications that keep their talks in that form.

Above: applications, which give them to `LoopRequest`. Below: `transcript`. The model is sent the same messages again
(https://platform.openai.com/docs/api-reference/chat/create).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolhost.loop.errors import RequestError
from toolhost.loop.transcript import Item, call_item

_ROLES = ("system", "developer", "user", "assistant")
_REASONING = ("reasoning_content", "reasoning")


def items_of_chat(messages: Iterable[Mapping[str, Any]]) -> list[Item]:
    """Messages with text, images, tool calls, tool results and reasoning as items of the Responses API.

    Raises RequestError naming the message that is wrong.
    """
    return [item for number, message in enumerate(messages) for item in _items(message, f"messages[{number}]")]


def _items(message: Mapping[str, Any], place: str) -> list[Item]:
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise RequestError(f"{place} needs the tool_call_id of the call that it answers", "input")
        output = content if isinstance(content, str) else _parts(content, place)
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}]
    if role not in _ROLES:
        raise RequestError(f"{place} has the role {role!r}; roles are {', '.join(_ROLES)} and tool", "input")
    items: list[Item] = []
    for field in _REASONING:
        if role == "assistant" and isinstance(message.get(field), str) and message[field]:
            thought = [{"type": "reasoning_text", "text": message[field]}]
            replay = {"dialect": "chat", "field": field}
            items.append({"type": "reasoning", "summary": [], "content": thought, "replay": replay})
    if content:
        parts = content if isinstance(content, str) else _parts(content, place)
        items.append({"type": "message", "role": role, "content": parts})
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError(f"{place}.tool_calls must be a list", "input")
    items += [_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)]
    if not items:
        raise RequestError(f"{place} has neither content nor tool calls", "input")
    return items


def _call(call: Any, place: str) -> Item:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping):
        match call.get("id"), function.get("name"), function.get("arguments"):
            case str(call_id), str(name), str(arguments):
                return call_item(call_id, name, arguments)
    raise RequestError(f"{place} needs an id and a function with name and arguments", "input")


def _parts(content: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise RequestError(f"{place} needs content: a text or a list of parts", "input")
    parts: list[dict[str, Any]] = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "input_text", "text": text})
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                parts.append({"type": "input_image", "image_url": url, "detail": "auto"})
            case _:
                raise RequestError(f"{place} has a content part that is neither text nor image_url", "input")
    return parts
