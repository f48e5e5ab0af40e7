"""Anthropic Messages: `/v1/messages`. The whole history is sent every time; `max_tokens` is required there."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from toolhost.loop.models.base import (
    CallDelta,
    ModelDelta,
    ModelRequest,
    ReasoningDelta,
    ReasoningReplay,
    RoundEnd,
    Stop,
    TextDelta,
    Usage,
    tokens,
    well_formed,
)
from toolhost.loop.models.wire import Wire
from toolhost.loop.transcript import Item, Turn, reasoning_text, turns

_VERSION = "2023-06-01"
_DEFAULT_MAX_TOKENS = 8192
_ENDS = {"message_stop"}
_STOPS: dict[str, Stop] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "filter",
}


class AnthropicModel:
    """A server of the Messages API. `base_url` ends in `/v1`."""

    dialect = "anthropic"

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        headers = {"anthropic-version": _VERSION} | ({"x-api-key": api_key} if api_key else {})
        self._wire = Wire(base_url, headers, timeout)

    async def aclose(self) -> None:
        await self._wire.aclose()

    async def round(self, request: ModelRequest) -> AsyncGenerator[ModelDelta, None]:
        reader = _Reader()
        if not request.stream:
            for delta in well_formed(reader.whole(await self._wire.json("/messages", _body(request)))):
                yield delta
        else:
            async with aclosing(self._wire.events("/messages", _body(request), _ENDS)) as events:
                async for event in events:
                    for delta in well_formed(reader.event(event)):
                        yield delta
        yield reader.end()


class _Reader:
    """Events to fragments, by the index of the content block."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self._signatures: dict[int, str] = {}
        self._thinking: set[int] = set()
        self._usage: dict[str, int] = {}
        self._stop: Stop | None = None

    def whole(self, answer: Mapping[str, Any]) -> Iterator[ModelDelta]:
        for index, block in enumerate(answer.get("content") or ()):
            yield from self.block(index, block)
        self.note(answer.get("usage") or {}, answer.get("stop_reason"))

    def event(self, event: Mapping[str, Any]) -> Iterator[ModelDelta]:
        index = event.get("index", 0)
        match event.get("type"):
            case "message_start":
                self.note(event["message"].get("usage") or {}, None)
            case "content_block_start":
                yield from self._start(index, event["content_block"])
            case "content_block_delta":
                yield from self._delta(index, event["delta"])
            case "content_block_stop" if index in self._thinking:
                yield ReasoningReplay({"dialect": "anthropic", "signature": self._signatures.get(index, "")})
            case "message_delta":
                self.note(event.get("usage") or {}, event["delta"].get("stop_reason"))

    def block(self, index: int, block: Mapping[str, Any]) -> Iterator[ModelDelta]:
        match block.get("type"):
            case "thinking":
                yield ReasoningDelta(block.get("thinking", ""))
                yield ReasoningReplay({"dialect": "anthropic", "signature": block.get("signature", "")})
            case "text" if block.get("text"):
                yield TextDelta(block["text"])
            case "tool_use":
                yield self._call(index, block)
                yield CallDelta(self._calls[index], arguments=json.dumps(block.get("input") or {}))
            case _:
                yield from self._start(index, block)

    def note(self, usage: Mapping[str, Any], stop_reason: str | None) -> None:
        self._usage |= {name: tokens(value) for name, value in usage.items() if isinstance(value, int)}
        if stop_reason:
            self._stop = _STOPS.get(stop_reason, "stop")

    def end(self) -> RoundEnd:
        cached = self._usage.get("cache_read_input_tokens", 0)
        fresh = self._usage.get("input_tokens", 0) + self._usage.get("cache_creation_input_tokens", 0)
        usage = Usage(fresh + cached, cached, self._usage.get("output_tokens", 0))
        return RoundEnd(self._stop or "truncated", usage)

    def _start(self, index: int, block: Mapping[str, Any]) -> Iterator[ModelDelta]:
        match block.get("type"):
            case "tool_use":
                yield self._call(index, block)
            case "thinking":
                self._thinking.add(index)
            case "redacted_thinking":
                yield ReasoningReplay({"dialect": "anthropic", "redacted": block.get("data", "")})

    def _delta(self, index: int, delta: Mapping[str, Any]) -> Iterator[ModelDelta]:
        match delta.get("type"):
            case "text_delta":
                yield TextDelta(delta["text"])
            case "thinking_delta":
                yield ReasoningDelta(delta["thinking"])
            case "signature_delta":
                self._signatures[index] = self._signatures.get(index, "") + delta["signature"]
            case "input_json_delta":
                yield CallDelta(self._calls[index], arguments=delta["partial_json"])

    def _call(self, index: int, block: Mapping[str, Any]) -> CallDelta:
        key = self._calls.setdefault(index, len(self._calls))
        return CallDelta(key, block.get("id") or "", block.get("name") or "")


def _body(request: ModelRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "messages": _messages(turns(request.items)),
        "max_tokens": request.max_output_tokens or _DEFAULT_MAX_TOKENS,
        "stream": request.stream,
    }
    system = [request.instructions] if request.instructions else []
    system += [turn.text for turn in turns(request.items) if turn.role == "system"]
    if system:
        body["system"] = "\n\n".join(system)
    if request.tools:
        body["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
            for tool in request.tools
        ]
        body["tool_choice"] = _choice(request)
    for name in ("temperature", "top_p"):
        if request.options.get(name) is not None:
            body[name] = request.options[name]
    return body


def _choice(request: ModelRequest) -> dict[str, Any]:
    kinds = {"auto": "auto", "none": "none", "required": "any"}
    choice = request.tool_choice
    result: dict[str, Any] = {"type": kinds[choice]} if choice in kinds else {"type": "tool", "name": choice}
    if choice != "none" and not request.parallel_tool_calls:
        result["disable_parallel_tool_use"] = True
    return result


def _messages(history: list[Turn]) -> list[dict[str, Any]]:
    """Roles alternate there: neighbours of one role become one message, results first."""
    messages: list[dict[str, Any]] = []
    for turn in history:
        if turn.role == "system":
            continue
        role = "assistant" if turn.role == "assistant" else "user"
        blocks = list(_blocks(turn))
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += blocks
        elif blocks:
            messages.append({"role": role, "content": blocks})
    return messages


def _blocks(turn: Turn) -> Iterator[dict[str, Any]]:
    if turn.role == "tool":
        yield {"type": "tool_result", "tool_use_id": turn.call_id, "content": [_part(part) for part in turn.parts]}
        return
    for item in turn.reasoning:
        yield from _thinking(item)
    yield from (_part(part) for part in turn.parts if part.get("text") or part["type"] != "text")
    for call in turn.calls:
        yield {"type": "tool_use", "id": call.call_id, "name": call.name, "input": json.loads(call.arguments)}


def _thinking(item: Item) -> Iterator[dict[str, Any]]:
    """Thinking goes back with its signature or not at all: an unsigned block is refused there."""
    replay = item.get("replay") or {}
    if replay.get("redacted"):
        yield {"type": "redacted_thinking", "data": replay["redacted"]}
    elif replay.get("signature"):
        yield {"type": "thinking", "thinking": reasoning_text(item), "signature": replay["signature"]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    url = part["url"]
    if url.startswith("data:"):
        media, _, data = url[5:].partition(";base64,")
        return {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}
    return {"type": "image", "source": {"type": "url", "url": url}}
