"""One model round: fragments in, items and events out, and the whole at the end."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from toolhost.loop.call_items import CodeCall, FunctionCall, McpCall
from toolhost.loop.events import Emitter
from toolhost.loop.hooks import Annotate, Check, Gate, Refuse
from toolhost.loop.ids import IdSource
from toolhost.loop.models.base import (
    CallDelta,
    ModelDelta,
    ReasoningDelta,
    ReasoningReplay,
    RefusalDelta,
    RoundEnd,
    Stop,
    TextDelta,
    Usage,
)
from toolhost.loop.output_items import Event, Message, OutputItem, Reasoning
from toolhost.loop.steps import ModelCall, Outcome, parse_arguments
from toolhost.loop.tools import ClientFunction, HostedTool, Toolbox
from toolhost.loop.transcript import UNKNOWN_LABEL, Item, call_item, call_suffix


@dataclass
class OpenCall:
    """A call being read. `suffix` is the part that its ids share (`transcript.call_suffix`)."""

    suffix: str
    call_id: str
    name: str = ""
    arguments: str = ""
    item: OutputItem | None = None
    routed: bool = False
    """Its name and ids are final."""
    written: int = 0
    """Characters of the arguments that have been written to the item."""

    @property
    def model_call(self) -> ModelCall:
        return ModelCall(self.call_id, self.name, self.arguments)


class RoundReader:
    """Reads one round. Feed it every fragment, then call `finish` once.

    `calls_wanted` bounds the calls that are taken (1 without parallel calls, 0 in a round without tools).
    """

    def __init__(
        self,
        emitter: Emitter,
        ids: IdSource,
        toolbox: Toolbox,
        *,
        check: Check | None,
        annotate: Annotate | None = None,
        container_id: str,
        used_call_ids: set[str],
        calls_wanted: int | None,
    ) -> None:
        self._emitter = emitter
        self._ids = ids
        self._toolbox = toolbox
        self._container_id = container_id
        self._used = used_call_ids
        self._wanted = calls_wanted
        self._annotate = annotate
        self._text_gate = Gate(check)
        self._thought_gate = Gate(check)
        self._message: Message | None = None
        self._reasoning: Reasoning | None = None
        self._thought = ""
        self._refusal_text = ""
        self._calls: dict[int, OpenCall] = {}
        self._round_id = ""
        self._replayed: list[Item] = []
        self._end = RoundEnd("truncated")
        self.text = ""
        self.refusal: Refuse | None = None
        self.surplus = 0
        """Calls that were left out."""

    @property
    def usage(self) -> Usage:
        return self._end.usage

    @property
    def stop(self) -> Stop:
        return self._end.stop

    @property
    def calls(self) -> list[OpenCall]:
        return [self._calls[key] for key in sorted(self._calls)]

    async def feed(self, delta: ModelDelta) -> list[Event]:
        """The events that a fragment causes; none after a refusal.

        Checks are awaited first and events made afterwards at one go: a cancel in between loses no numbered event.
        """
        if self.refusal is not None:
            return []
        if isinstance(delta, RoundEnd):
            self._end = delta
            return []
        if isinstance(delta, ReasoningDelta):
            allowed, refusal = await self._thought_gate.write(delta.text)
            self._thought += delta.text
            return self._think(allowed) + self._refuse(refusal)
        rest = await self._thought_gate.flush()
        checked = await self._text_gate.write(delta.text) if isinstance(delta, TextDelta) else ("", None)
        events = self._end_thought(rest, dict(delta.data) if isinstance(delta, ReasoningReplay) else None)
        if self.refusal is not None:
            return events
        match delta:
            case TextDelta(text):
                self.text += text
                return events + self._say(checked[0]) + self._refuse(checked[1])
            case RefusalDelta(text):
                self._refusal_text += text
            case CallDelta():
                events += self._call(delta)
        return events

    async def finish(self) -> list[Event]:
        """End the round. After a whole one its message is closed and its calls are sealed; else they stay open."""
        if self.refusal is not None:
            return []
        rest, (allowed, refusal) = await self._thought_gate.flush(), await self._text_gate.flush()
        cited = await self._annotate(self.text) if self._annotate is not None and self.text else []
        events = self._end_thought(rest)
        if self.refusal is None:
            events += self._say(allowed) + self._refuse(refusal)
        if self.refusal is None and self._refusal_text:
            events += self._refuse(Refuse(self._refusal_text))
        if self.refusal is not None:
            return events
        if self._end.stop not in ("stop", "calls"):
            return events + self._open_rest()
        for call in self.calls:
            # A call without arguments is spelt differently by each wire; clients parse what they get.
            call.arguments = call.arguments or "{}"
        events += self._open_rest()
        if self._message is not None:
            events += self._message.annotate(cited) + self._message.close()
        return events + self._seal()

    def say_nothing(self) -> list[Event]:
        """An empty message, so that a run that ends completed ends visibly."""
        if self._message is not None:
            return []
        self._message, events = self._emitter.message()
        return events + self._message.write("") + self._message.close()

    def outcome(self) -> Outcome:
        calls = [call.model_call for call in self.calls]
        tokens = self._end.usage.output_tokens
        return Outcome(self._end.stop, bool(self.text), calls, tokens, self.refusal is not None)

    def transcript(self, waiting: Collection[str] = ()) -> list[Item]:
        """The round as the model should see it again: thoughts, text, calls; those in `waiting` were not executed."""
        items = list(self._replayed)
        if self.text and self.refusal is None:
            items.append({"type": "message", "role": "assistant", "content": self.text})
        return items + [
            call_item(one.call_id, _wire_name(one.name), one.arguments, one.call_id not in waiting)
            for one in self.calls
        ]

    def _think(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        if self._reasoning is None:
            self._reasoning, events = self._emitter.reasoning()
        return events + self._reasoning.write(text)

    def _end_thought(self, rest: tuple[str, Refuse | None], replay: dict[str, Any] | None = None) -> list[Event]:
        if not self._thought and replay is None:
            return []
        if not self._thought and replay and self._replayed and not self._replayed[-1]["replay"]:
            self._replayed[-1]["replay"] = replay  # it came after what followed the thought
            return []
        allowed, refusal = rest
        events = self._think(allowed)
        content = [{"type": "reasoning_text", "text": self._thought}] if self._thought else []
        self._replayed.append({"type": "reasoning", "summary": [], "content": content, "replay": replay or {}})
        if self._reasoning is not None:
            events += self._reasoning.close("completed" if refusal is None else "incomplete")
        self._reasoning, self._thought = None, ""
        return events + self._refuse(refusal)

    def _say(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        if self._message is None:
            self._message, events = self._emitter.message()
        return events + self._message.write(text)

    def _refuse(self, refusal: Refuse | None) -> list[Event]:
        """Nothing follows: open items end, and the message ends with the refusal."""
        if refusal is None:
            return []
        self.refusal = refusal
        events: list[Event] = []
        for item in self._emitter.items:
            if item is not self._message:
                events += item.abort()
        if self._message is None:
            self._message, opened = self._emitter.message()
            events += opened
        return events + self._message.refuse(refusal.reason) + self._message.close()

    def _call(self, delta: CallDelta) -> list[Event]:
        call = self._calls.get(delta.key)
        if call is None:
            if self._wanted is not None and len(self._calls) >= self._wanted:
                self.surplus += 1
                return []
            self._round_id = self._round_id or self._ids.new("call").partition("_")[2]
            suffix = call_suffix(self._round_id, len(self._calls))
            call = self._calls[delta.key] = OpenCall(suffix, f"call_{suffix}")
        if delta.call_id and delta.call_id not in self._used and not call.routed:
            call.call_id = delta.call_id
        if delta.name and delta.name != call.name and not call.routed:
            call.name += delta.name
        call.arguments += delta.arguments
        return self._open(call) if delta.arguments else []

    def _open(self, call: OpenCall) -> list[Event]:
        """Open the call's item once its name is whole, and write what has come of its arguments."""
        events: list[Event] = []
        if not call.routed:
            call.routed = True
            events = self._new_item(call)
        if isinstance(call.item, (FunctionCall, McpCall)) and call.written < len(call.arguments):
            events += call.item.write(call.arguments[call.written :])
            call.written = len(call.arguments)
        return events

    def _new_item(self, call: OpenCall) -> list[Event]:
        route = self._toolbox.route(call.name)
        if isinstance(route, ClientFunction):
            if call.call_id in self._used:
                call.call_id = f"call_{call.suffix}"
            self._used.add(call.call_id)
            call.name = route.name
            call.item, events = self._emitter.function_call(f"fc_{call.suffix}", call.call_id, route.name)
            return events
        # A hosted call's ids are ours: models repeat theirs.
        call.call_id = f"call_{call.suffix}"
        self._used.add(call.call_id)
        if route is None:
            call.item, events = self._emitter.mcp_call(f"mcp_{call.suffix}", UNKNOWN_LABEL, call.name)
            return events
        call.name = self._toolbox.names[(route.namespace, route.name)]
        return self._hosted_item(call, route)

    def _hosted_item(self, call: OpenCall, tool: HostedTool) -> list[Event]:
        namespace = self._toolbox.namespaces[tool.namespace]
        if namespace.needs_approval(tool.name):
            return []
        events: list[Event] = []
        match namespace.kind:
            case "code":
                call.item, events = self._emitter.code_call(f"ci_{call.suffix}", self._container_id)
            case "mcp":
                call.item, events = self._emitter.mcp_call(f"mcp_{call.suffix}", tool.namespace, tool.name)
            case "search":
                # Its action is part of the item, so it waits for the arguments.
                pass
        return events

    def _open_rest(self) -> list[Event]:
        return [event for call in self.calls if call.name for event in self._open(call)]

    def _seal(self) -> list[Event]:
        events: list[Event] = []
        for call in self.calls:
            if isinstance(call.item, (FunctionCall, McpCall)):
                events += call.item.seal()
            elif isinstance(call.item, CodeCall):
                code = code_of(call.arguments)
                events += (call.item.write(code) if code else []) + call.item.seal()
        return events


def _wire_name(name: str) -> str:
    """A name that every wire takes back, also one that the model made up."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "unnamed"


def code_of(arguments: str) -> str:
    """The code in the arguments of a call to Python; what cannot be read is shown as it came."""
    value = parse_arguments(arguments)
    return str(value.get("code") or "") if isinstance(value, dict) else arguments
