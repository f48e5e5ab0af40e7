"""Chat Completions: vLLM, SGLang, llama.cpp, Ollama and whatever else speaks `/v1/chat/completions`."""

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
from toolhost.loop.transcript import Turn, reasoning_text, turns

_STOPS: dict[str, Stop] = {
    "stop": "stop",
    "tool_calls": "calls",
    "function_call": "calls",
    "length": "length",
    "content_filter": "filter",
}
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_PLAIN_OPTIONS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "seed", "stop")


class ChatModel:
    """A server of Chat Completions. `base_url` ends in `/v1`."""

    dialect = "chat"

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._wire = Wire(base_url, headers, timeout)

    async def aclose(self) -> None:
        await self._wire.aclose()

    async def round(self, request: ModelRequest) -> AsyncGenerator[ModelDelta, None]:
        reader = _Reader()
        if not request.stream:
            for delta in well_formed(reader.whole(await self._wire.json("/chat/completions", _body(request)))):
                yield delta
            yield reader.end()
            return
        async with aclosing(self._wire.events("/chat/completions", _body(request))) as chunks:
            async for chunk in chunks:
                for delta in well_formed(reader.chunk(chunk)):
                    yield delta
        for delta in reader.rest():
            yield delta
        yield reader.end()


class _Reader:
    """Chunks to fragments. A call is known by its index; a new id under an old index is a new call.

    Servers that count their indices up within one call are known by its id; but a name begins a call, whatever its id.
    """

    def __init__(self) -> None:
        self._keys: dict[Any, int] = {}
        self._ids: dict[int, str] = {}
        self._count = 0
        self._field: str | None = None
        self._stop: Stop | None = None
        self._usage = Usage()

    def whole(self, answer: Mapping[str, Any]) -> Iterator[ModelDelta]:
        choice = _choice(answer)
        if choice is None:
            raise ModelError("the model server's answer has no choices")
        self._note(answer, choice)
        yield from self._message(choice.get("message") or {})
        yield from self.rest()

    def chunk(self, chunk: Mapping[str, Any]) -> Iterator[ModelDelta]:
        choice = _choice(chunk)
        self._note(chunk, choice)
        if choice is not None:
            yield from self._message(choice.get("delta") or {})

    def rest(self) -> Iterator[ModelDelta]:
        if self._field is not None:
            yield ReasoningReplay({"dialect": "chat", "field": self._field})
            self._field = None

    def end(self) -> RoundEnd:
        stop = self._stop or "truncated"
        if stop == "stop" and self._count:
            stop = "calls"
        return RoundEnd(stop, self._usage)

    def _note(self, data: Mapping[str, Any], choice: Mapping[str, Any] | None) -> None:
        if data.get("usage"):
            self._usage = _usage(data["usage"])
        if choice is not None and choice.get("finish_reason"):
            self._stop = _STOPS.get(choice["finish_reason"], "stop")

    def _message(self, message: Mapping[str, Any]) -> Iterator[ModelDelta]:
        for name in _REASONING_FIELDS:
            if isinstance(message.get(name), str) and message[name]:
                self._field = name
                yield ReasoningDelta(message[name])
                break
        text, calls = message.get("content"), message.get("tool_calls") or ()
        if (text or calls or message.get("refusal")) and self._field is not None:
            yield from self.rest()
        if isinstance(text, str) and text:
            yield TextDelta(text)
        if isinstance(message.get("refusal"), str) and message["refusal"]:
            yield RefusalDelta(message["refusal"])
        for position, call in enumerate(calls):
            yield self._call(position, call)

    def _call(self, position: int, call: Mapping[str, Any]) -> CallDelta:
        function = call.get("function") or {}
        index, call_id = call.get("index", position), call.get("id") or ""
        key = self._keys.get(index)
        if key is None or (call_id and self._ids.get(key, "") not in ("", call_id)):
            key = next((one for one, known in self._ids.items() if call_id and known == call_id), None)
            if key is None or function.get("name"):
                key = self._count
                self._count += 1
            self._keys[index] = key
        self._ids[key] = call_id or self._ids.get(key, "")
        arguments = function.get("arguments")
        return CallDelta(key, call_id, function.get("name") or "", arguments if isinstance(arguments, str) else "")


def _choice(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = data.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _usage(usage: Mapping[str, Any]) -> Usage:
    prompt = usage.get("prompt_tokens_details") or {}
    completion = usage.get("completion_tokens_details") or {}
    return Usage(
        tokens(usage.get("prompt_tokens")),
        tokens(prompt.get("cached_tokens")),
        tokens(usage.get("completion_tokens")),
        tokens(completion.get("reasoning_tokens")),
    )


def _body(request: ModelRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_message(turn) for turn in turns(request.items, request.instructions)],
        "stream": request.stream,
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    if request.max_output_tokens is not None:
        body["max_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [_tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in request.tools]
        body["tool_choice"] = _choice_of_tool(request.tool_choice)
        body["parallel_tool_calls"] = request.parallel_tool_calls
    return body | _options(request.options)


def _tool(name: str, description: str, parameters: Mapping[str, Any], strict: bool | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": description, "parameters": dict(parameters)}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def _choice_of_tool(choice: str) -> Any:
    return choice if choice in ("auto", "none", "required") else {"type": "function", "function": {"name": choice}}


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    result = {name: options[name] for name in _PLAIN_OPTIONS if options.get(name) is not None}
    effort = (options.get("reasoning") or {}).get("effort")
    if effort:
        result["reasoning_effort"] = effort
    form = (options.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        schema = {key: form[key] for key in ("name", "schema", "strict", "description") if form.get(key) is not None}
        result["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form.get("type") == "json_object":
        result["response_format"] = {"type": "json_object"}
    return result


def _message(turn: Turn) -> dict[str, Any]:
    if turn.role == "tool":
        return {"role": "tool", "tool_call_id": turn.call_id, "content": _content(turn)}
    if turn.role != "assistant":
        return {"role": turn.role, "content": _content(turn)}
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
    for item in turn.reasoning:
        replay = item.get("replay") or {}
        if replay.get("dialect") == "chat":
            message[replay["field"]] = message.get(replay["field"], "") + reasoning_text(item)
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    return message


def _content(turn: Turn) -> Any:
    if all(part["type"] == "text" for part in turn.parts):
        return turn.text
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "image_url", "image_url": {"url": part["url"]}}
        for part in turn.parts
    ]
