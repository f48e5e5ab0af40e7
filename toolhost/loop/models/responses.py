"""Responses: an upstream that has `/v1/responses` itself, used for one generation at a time, without its state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from toolhost.loop.errors import ModelError
from toolhost.loop.models.base import (
    CallDelta,
    ModelDelta,
    ModelRequest,
    ReasoningDelta,
    ReasoningReplay,
    RefusalDelta,
    RoundEnd,
    Stop,
    TextDelta,
    Usage,
    tokens,
    well_formed,
)
from toolhost.loop.models.wire import Wire
from toolhost.loop.transcript import Item, reasoning_text, turns

_PLAIN_OPTIONS = ("temperature", "top_p", "top_logprobs", "reasoning", "text", "service_tier")
_ENDS = {"response.completed", "response.incomplete", "response.failed"}


class ResponsesModel:
    """A server of the Responses API. `base_url` ends in `/v1`."""

    dialect = "responses"

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._wire = Wire(base_url, headers, timeout)

    async def aclose(self) -> None:
        await self._wire.aclose()

    async def round(self, request: ModelRequest) -> AsyncGenerator[ModelDelta, None]:
        reader = _Reader()
        if not request.stream:
            for delta in well_formed(reader.whole(await self._wire.json("/responses", _body(request)))):
                yield delta
        else:
            async with aclosing(self._wire.events("/responses", _body(request), _ENDS)) as events:
                async for event in events:
                    for delta in well_formed(reader.event(event)):
                        yield delta
        yield reader.end()


class _Reader:
    """Events to fragments. What a delta already brought is not taken again from the item that ends it."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self._got: dict[int, str] = {}
        self._end: RoundEnd | None = None

    def whole(self, answer: Mapping[str, Any]) -> Iterator[ModelDelta]:
        for index, item in enumerate(answer.get("output") or ()):
            yield from self.item(index, item)
        self.close(answer)

    def event(self, event: Mapping[str, Any]) -> Iterator[ModelDelta]:
        kind, index = str(event.get("type", "")), event.get("output_index", 0)
        match kind:
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                item = event["item"]
                yield CallDelta(self._key(index), item.get("call_id") or "", item.get("name") or "")
            case "response.output_text.delta":
                yield TextDelta(self._take(index, event["delta"]))
            case "response.refusal.delta":
                yield RefusalDelta(self._take(index, event["delta"]))
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                yield ReasoningDelta(self._take(index, event["delta"]))
            case "response.function_call_arguments.delta":
                yield CallDelta(self._key(index), arguments=self._take(index, event["delta"]))
            case "response.output_item.done":
                yield from self.item(index, event["item"])
            case "error":
                raise ModelError(f"the model server reported an error: {event.get('message')}")
            case _ if kind in _ENDS:
                self.close(event["response"])

    def item(self, index: int, item: Mapping[str, Any]) -> Iterator[ModelDelta]:
        got = self._got.get(index, "")
        match item.get("type"):
            case "message" if not got:
                for part in item.get("content") or ():
                    if part.get("refusal"):
                        yield RefusalDelta(part["refusal"])
                    elif part.get("text"):
                        yield TextDelta(part["text"])
            case "reasoning":
                if not got:
                    parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
                    text = "".join(part.get("text", "") for part in parts)
                    if text:
                        yield ReasoningDelta(text)
                kept = {key: item[key] for key in ("id", "summary", "content", "encrypted_content") if item.get(key)}
                yield ReasoningReplay({"dialect": "responses", "item": kept})
            case "function_call":
                arguments = "" if got else item.get("arguments") or ""
                yield CallDelta(self._key(index), item.get("call_id") or "", item.get("name") or "", arguments)

    def close(self, response: Mapping[str, Any]) -> None:
        if response.get("status") == "failed":
            error = response.get("error") or {}
            raise ModelError(f"the model server reported: {error.get('message')}", error.get("code") or "server_error")
        stop: Stop = "calls" if self._calls else "stop"
        if response.get("status") == "incomplete":
            reason = (response.get("incomplete_details") or {}).get("reason")
            stop = "filter" if reason == "content_filter" else "length"
        self._end = RoundEnd(stop, _usage(response.get("usage") or {}))

    def end(self) -> RoundEnd:
        return self._end or RoundEnd("truncated")

    def _key(self, index: int) -> int:
        return self._calls.setdefault(index, len(self._calls))

    def _take(self, index: int, delta: str) -> str:
        self._got[index] = self._got.get(index, "") + delta
        return delta


def _usage(usage: Mapping[str, Any]) -> Usage:
    return Usage(
        tokens(usage.get("input_tokens")),
        tokens((usage.get("input_tokens_details") or {}).get("cached_tokens")),
        tokens(usage.get("output_tokens")),
        tokens((usage.get("output_tokens_details") or {}).get("reasoning_tokens")),
    )


def _body(request: ModelRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "input": list(_input(request)),
        "stream": request.stream,
        "store": False,
    }
    if request.instructions:
        body["instructions"] = request.instructions
    if request.max_output_tokens is not None:
        body["max_output_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
                "strict": bool(tool.strict),
            }
            for tool in request.tools
        ]
        choice = request.tool_choice
        plain = choice in ("auto", "none", "required")
        body["tool_choice"] = choice if plain else {"type": "function", "name": choice}
        body["parallel_tool_calls"] = request.parallel_tool_calls
    options = request.options
    return body | {name: options[name] for name in _PLAIN_OPTIONS if options.get(name) is not None}


def _input(request: ModelRequest) -> Iterator[Item]:
    for turn in turns(request.items):
        if turn.role == "tool":
            yield {"type": "function_call_output", "call_id": turn.call_id, "output": _output(turn.parts)}
            continue
        if turn.role != "assistant":
            yield {"type": "message", "role": turn.role, "content": _content(turn.parts)}
            continue
        for item in turn.reasoning:
            yield from _reasoning(item)
        if turn.parts:
            yield {"type": "message", "role": "assistant", "content": turn.text}
        for call in turn.calls:
            yield {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}


def _reasoning(item: Item) -> Iterator[Item]:
    """Only what came from such an upstream, or what a client sealed, is of use to one."""
    replay = item.get("replay") or {}
    if replay.get("dialect") == "responses":
        yield {"type": "reasoning", "summary": [], **replay["item"]}
    elif item.get("encrypted_content") and not reasoning_text(item):
        yield {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}


def _content(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["url"], "detail": "auto"}
        for part in parts
    ]


def _output(parts: list[dict[str, Any]]) -> Any:
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return _content(parts)
