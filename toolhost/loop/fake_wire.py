"""The wire formats of the fake model: a neutral answer as each API's stream and as its whole object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Frame = tuple[bool, str]
"""Whether it is one of the answer's fragments, and the text on the wire."""


@dataclass(frozen=True, slots=True)
class Fragment:
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    index: int = 0
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    fragments: list[Fragment]
    finish: str
    """stop, calls, length, filter or none."""
    model: str
    input_tokens: int
    output_tokens: int

    def joined(self, kind: str) -> str:
        return "".join(one.text for one in self.fragments if one.kind == kind)

    def calls(self) -> list[Fragment]:
        """Each call whole."""
        heads = [one for one in self.fragments if one.kind == "call" and one.name]
        return [
            Fragment("call", "".join(one.text for one in self._of(head.index)), head.index, head.call_id, head.name)
            for head in heads
        ]

    def _of(self, index: int) -> Iterator[Fragment]:
        return (one for one in self.fragments if one.kind == "call" and one.index == index)


@dataclass(frozen=True, slots=True)
class Wire:
    stream: Callable[[Answer], Sequence[Frame]]
    whole: Callable[[Answer], dict[str, Any]]


def last_user_text(body: Mapping[str, Any]) -> str:
    """The text of a request's last user message, in any of the APIs."""
    messages = body.get("messages") or body.get("input") or []
    if isinstance(messages, str):
        return messages
    for message in reversed(messages):
        text = _text(message.get("content")) if message.get("role") == "user" else ""
        if text:
            return text
    return ""


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if part.get("type") in ("text", "input_text"))


def _data(value: Mapping[str, Any], event: str | None = None) -> str:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value)}\n\n"


# Chat Completions

_CHAT_FINISH = {"stop": "stop", "calls": "tool_calls", "length": "length", "filter": "content_filter"}


def _chat_stream(answer: Answer) -> list[Frame]:
    frames = [(False, _data(_chat_chunk(answer, {"role": "assistant", "content": ""})))]
    frames += [(True, _data(_chat_chunk(answer, _chat_delta(one)))) for one in answer.fragments]
    if answer.finish == "none":
        return frames
    frames.append((False, _data(_chat_chunk(answer, {}, _CHAT_FINISH[answer.finish]))))
    usage = {**_chat_chunk(answer, {}), "choices": [], "usage": _chat_usage(answer)}
    return [*frames, (False, _data(usage)), (False, "data: [DONE]\n\n")]


def _chat_delta(one: Fragment) -> dict[str, Any]:
    if one.kind != "call":
        return {"reasoning_content" if one.kind == "reasoning" else "content": one.text}
    call: dict[str, Any] = {"index": one.index, "function": {"arguments": one.text}}
    if one.name:
        call |= {"id": one.call_id, "type": "function", "function": {"name": one.name, "arguments": ""}}
    return {"tool_calls": [call]}


def _chat_chunk(answer: Answer, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": answer.model,
        "choices": [choice],
    }


def _chat_usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.input_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.input_tokens + answer.output_tokens,
    }


def _chat_whole(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.joined("text") or None}
    if answer.joined("reasoning"):
        message["reasoning_content"] = answer.joined("reasoning")
    calls = [
        {"id": one.call_id, "type": "function", "function": {"name": one.name, "arguments": one.text}}
        for one in answer.calls()
    ]
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": _CHAT_FINISH.get(answer.finish)}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": answer.model,
        "choices": [choice],
        "usage": _chat_usage(answer),
    }


# Responses


def _responses_items(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.joined("reasoning"):
        content = [{"type": "reasoning_text", "text": answer.joined("reasoning")}]
        items.append({"id": "rs_1", "type": "reasoning", "summary": [], "content": content})
    if answer.joined("text"):
        parts: list[Any] = [{"type": "output_text", "text": answer.joined("text"), "annotations": []}]
        message: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**message, "content": parts})
    for one in answer.calls():
        call = {"id": f"fc_{one.index}", "type": "function_call", "call_id": one.call_id, "name": one.name}
        items.append({**call, "arguments": one.text, "status": "completed"})
    return items


def _responses_whole(answer: Answer) -> dict[str, Any]:
    status = {"stop": "completed", "calls": "completed"}.get(answer.finish, "incomplete")
    reasons = {"length": {"reason": "max_output_tokens"}, "filter": {"reason": "content_filter"}}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": answer.model,
        "status": status,
        "error": None,
        "incomplete_details": reasons.get(answer.finish),
        "output": _responses_items(answer),
        "usage": {
            "input_tokens": answer.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.input_tokens + answer.output_tokens,
        },
    }


_RESPONSES_DELTAS = {
    "reasoning": "response.reasoning_text.delta",
    "text": "response.output_text.delta",
    "call": "response.function_call_arguments.delta",
}


_EMPTY: dict[str, dict[str, Any]] = {"reasoning": {"content": []}, "text": {"content": []}, "call": {"arguments": ""}}


def _responses_stream(answer: Answer) -> list[Frame]:
    whole = _responses_whole(answer)
    places = {_place(item): index for index, item in enumerate(whole["output"])}
    frames: list[Frame] = []
    number = 0

    def put(is_fragment: bool, kind: str, **fields: Any) -> None:
        nonlocal number
        frames.append((is_fragment, _data({"type": kind, "sequence_number": number, **fields}, kind)))
        number += 1

    started: dict[str, Any] = {
        **whole,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    put(False, "response.created", response=started)
    open_items: list[tuple[str, int]] = []
    for one in answer.fragments:
        place = (one.kind, one.index)
        index = places[place]
        item = whole["output"][index]
        if place not in open_items:
            for earlier in [one for one in open_items if one[0] != "call"]:
                open_items.remove(earlier)
                put(False, "response.output_item.done", output_index=places[earlier], item=_at(whole, places[earlier]))
            open_items.append(place)
            bare = {**item, "status": "in_progress", **_EMPTY[one.kind]}
            put(False, "response.output_item.added", output_index=index, item=bare)
        put(True, _RESPONSES_DELTAS[one.kind], output_index=index, item_id=item["id"], content_index=0, delta=one.text)
    for left in open_items:
        put(False, "response.output_item.done", output_index=places[left], item=_at(whole, places[left]))
    if answer.finish != "none":
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        put(False, kind, response=whole)
    return frames


def _at(whole: Mapping[str, Any], index: int) -> dict[str, Any]:
    item: dict[str, Any] = whole["output"][index]
    return item


def _place(item: Mapping[str, Any]) -> tuple[str, int]:
    if item["type"] == "function_call":
        return "call", int(item["id"].removeprefix("fc_"))
    return ("reasoning" if item["type"] == "reasoning" else "text"), 0


# Anthropic Messages

_ANTHROPIC_FINISH = {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens", "filter": "refusal"}


def _anthropic_blocks(answer: Answer) -> list[tuple[tuple[str, int], dict[str, Any]]]:
    blocks: list[tuple[tuple[str, int], dict[str, Any]]] = []
    if answer.joined("reasoning"):
        thinking = {"type": "thinking", "thinking": answer.joined("reasoning"), "signature": "signed"}
        blocks.append((("reasoning", 0), thinking))
    if answer.joined("text"):
        blocks.append((("text", 0), {"type": "text", "text": answer.joined("text")}))
    for one in answer.calls():
        block = {"type": "tool_use", "id": one.call_id, "name": one.name, "input": _object(one.text)}
        blocks.append((("call", one.index), block))
    return blocks


def _object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _anthropic_message(answer: Answer, content: list[dict[str, Any]], finish: str | None) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": finish,
        "stop_sequence": None,
        "usage": {"input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens if finish else 1},
    }


def _anthropic_whole(answer: Answer) -> dict[str, Any]:
    blocks = [block for _, block in _anthropic_blocks(answer)]
    return _anthropic_message(answer, blocks, _ANTHROPIC_FINISH.get(answer.finish))


def _anthropic_stream(answer: Answer) -> list[Frame]:
    frames: list[Frame] = []

    def put(is_fragment: bool, kind: str, **fields: Any) -> None:
        frames.append((is_fragment, _data({"type": kind, **fields}, kind)))

    put(False, "message_start", message=_anthropic_message(answer, [], None))
    blocks = dict(_anthropic_blocks(answer))
    places = {place: index for index, place in enumerate(blocks)}
    opened: list[int] = []
    stopped: set[int] = set()

    def stop(index: int) -> None:
        """End a block; a thinking block is signed first."""
        if index in stopped:
            return
        stopped.add(index)
        if list(places)[index][0] == "reasoning":
            put(False, "content_block_delta", index=index, delta={"type": "signature_delta", "signature": "signed"})
        put(False, "content_block_stop", index=index)

    for one in answer.fragments:
        index = places[one.kind, one.index]
        if index not in opened:
            for earlier, place in enumerate(places):
                if earlier in opened and place[0] != "call":
                    stop(earlier)
            put(False, "content_block_start", index=index, content_block=_bare(blocks[one.kind, one.index]))
            opened.append(index)
        if one.text:
            put(True, "content_block_delta", index=index, delta=_anthropic_delta(one))
    for index in opened:
        stop(index)
    if answer.finish != "none":
        delta: dict[str, Any] = {"stop_reason": _ANTHROPIC_FINISH[answer.finish], "stop_sequence": None}
        put(False, "message_delta", delta=delta, usage={"output_tokens": answer.output_tokens})
        put(False, "message_stop")
    return frames


def _bare(block: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, dict[str, Any]] = {
        "thinking": {"thinking": "", "signature": ""},
        "text": {"text": ""},
        "tool_use": {"input": {}},
    }
    return {**block, **empty[block["type"]]}


def _anthropic_delta(one: Fragment) -> dict[str, Any]:
    match one.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": one.text}
        case "text":
            return {"type": "text_delta", "text": one.text}
    return {"type": "input_json_delta", "partial_json": one.text}


WIRES: Mapping[str, Wire] = MappingProxyType(
    {
        "/chat/completions": Wire(_chat_stream, _chat_whole),
        "/responses": Wire(_responses_stream, _responses_whole),
        "/messages": Wire(_anthropic_stream, _anthropic_whole),
    }
)
