"""A log of events to the response that it describes, and the events that a broken-off log still needs. Pure.

Above: `runs` (a GET in mid-run, the reconciler). Below: nothing. Events are plain data, as they went over the wire.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]
Item = dict[str, Any]

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})

_TEXT_DELTAS = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "text",
}
_CALL_DELTAS = {
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.code_interpreter_call_code.delta": "code",
}

DELTAS = frozenset({*_TEXT_DELTAS, *_CALL_DELTAS})
"""Events that only add to what is there."""


class Replay:
    """What a log says so far."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.open: set[int] = set()
        self.open_parts: set[int] = set()
        """Indexes of items whose last content part is not done."""
        self.count = 0
        self.response: dict[str, Any] | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> Replay:
        replay = cls()
        for event in events:
            replay.add(event)
        return replay

    @property
    def began(self) -> bool:
        return self.count > 0

    def add(self, event: Event) -> None:
        self.count += 1
        kind, index = event["type"], event.get("output_index", -1)
        match kind:
            case "response.output_item.added":
                self.items.append(copy.deepcopy(event["item"]))
                self.open.add(index)
            case "response.output_item.done":
                self.items[index] = event["item"]
                self.open.discard(index)
                self.open_parts.discard(index)
            case "response.content_part.added":
                self.items[index].setdefault("content", []).append(dict(event["part"]))
                self.open_parts.add(index)
            case "response.output_text.annotation.added":
                self.items[index]["content"][event["content_index"]]["annotations"].append(event["annotation"])
            case "response.content_part.done":
                self.open_parts.discard(index)
            case _ if kind in _TEXT_DELTAS:
                part, name = self.items[index]["content"][event["content_index"]], _TEXT_DELTAS[kind]
                part[name] = part.get(name, "") + event["delta"]
            case _ if kind in _CALL_DELTAS:
                name = _CALL_DELTAS[kind]
                self.items[index][name] = (self.items[index].get(name) or "") + event["delta"]
            case _ if "response" in event:
                self.response = event["response"]

    def closing(self) -> list[Event]:
        """The events that end the open items as incomplete, numbered on from the log."""
        events: list[Event] = []
        for index in sorted(self.open):
            item = self.items[index]
            if index in self.open_parts:
                events += _part_done(item, index)
            events.append({"type": "response.output_item.done", "output_index": index, "item": _incomplete(item)})
        for number, event in enumerate(events, self.count):
            event["sequence_number"] = number
        return events


def _part_done(item: Item, index: int) -> list[Event]:
    place = {"item_id": item["id"], "output_index": index, "content_index": len(item["content"]) - 1}
    part = item["content"][-1]
    match part["type"]:
        case "refusal":
            done = {"type": "response.refusal.done", **place, "refusal": part["refusal"]}
        case "reasoning_text":
            done = {"type": "response.reasoning_text.done", **place, "text": part["text"]}
        case _:
            done = {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
    return [done, {"type": "response.content_part.done", **place, "part": dict(part)}]


def _incomplete(item: Item) -> Item:
    if item["type"] == "mcp_list_tools":
        return {**item, "error": item.get("error") or "the response ended before the tools were listed"}
    if item["type"] == "mcp_approval_request":
        return item
    return {**item, "status": "incomplete"}
