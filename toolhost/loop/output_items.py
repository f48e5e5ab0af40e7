"""Output items while they are being written: each kind a small state machine that yields its events.

Above: `call_items`, and `events.Emitter`, which owns numbering and the response.
The order of each kind's events is the table `_TABLE`; a move that is not in it raises `IllegalOrder` with the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

from toolhost.loop.errors import IllegalOrder

Event = Any
"""One of `openai.types.responses.ResponseStreamEvent`'s classes (a union too wide to be of use as a static type)."""

Status = Literal["completed", "incomplete", "failed"]

_ARGS = {
    ("open", "delta"): "args",
    ("args", "delta"): "args",
    ("open", "args_done"): "ready",
    ("args", "args_done"): "ready",
}

_PARTS = {
    ("open", "part"): "part",
    ("part", "delta"): "part",
    ("part", "annotate"): "part",
    ("part", "part_done"): "open",
}

_TABLE: dict[str, dict[tuple[str, str], str]] = {
    "message": {("new", "add"): "open", **_PARTS, ("open", "close"): "closed"},
    "reasoning": {("new", "add"): "open", **_PARTS, ("open", "close"): "closed"},
    "function_call": {("new", "add"): "open", **_ARGS, ("ready", "close"): "closed"},
    "mcp_call": {
        ("new", "add"): "open",
        **_ARGS,
        ("ready", "end"): "ended",
        ("ended", "close"): "closed",
    },
    "code_interpreter_call": {
        ("new", "add"): "open",
        **_ARGS,
        ("ready", "interpreting"): "running",
        ("running", "end"): "ended",
        ("ended", "close"): "closed",
        ("running", "fail"): "closed",
        ("ready", "fail"): "closed",
    },
    "web_search_call": {
        ("new", "add"): "open",
        ("open", "searching"): "running",
        ("running", "end"): "ended",
        ("ended", "close"): "closed",
        ("running", "fail"): "closed",
        ("open", "fail"): "closed",
    },
    "mcp_list_tools": {("new", "add"): "open", ("open", "end"): "ended", ("ended", "close"): "closed"},
    "mcp_approval_request": {("new", "add"): "open", ("open", "close"): "closed"},
}


class Outlet(Protocol):
    """What an item needs from the emitter: a place to put events, numbered there."""

    def push(self, type_: str, **fields: Any) -> Event:
        """Number, validate and return the event of this type."""
        ...


class OutputItem:
    """Base of the items. Methods return the events they caused, in order."""

    kind: ClassVar[str]

    def __init__(self, outlet: Outlet, item_id: str, output_index: int) -> None:
        self.id = item_id
        self.output_index = output_index
        self.status: str = "in_progress"
        self._outlet = outlet
        self._state = "new"
        self._history: list[str] = []

    @property
    def closed(self) -> bool:
        return self._state == "closed"

    def dump(self) -> dict[str, Any]:
        """The item as it stands, in the shape of its `openai` type."""
        raise NotImplementedError

    def open(self) -> list[Event]:
        """`output_item.added`, and what follows it at once."""
        return [self._added()]

    def abort(self) -> list[Event]:
        """End an open item as incomplete, whatever its state; nothing for a closed one."""
        if self.closed:
            return []
        return self._finish("incomplete", None)

    def _go(self, move: str) -> None:
        state = _TABLE[self.kind].get((self._state, move))
        if state is None:
            raise IllegalOrder(f"{self.kind} {self.id}: {move!r} in state {self._state!r} after {self._history}")
        self._history.append(move)
        self._state = state

    def _event(self, type_: str, **fields: Any) -> Event:
        return self._outlet.push(f"response.{type_}", item_id=self.id, output_index=self.output_index, **fields)

    def _added(self) -> Event:
        self._go("add")
        return self._outlet.push("response.output_item.added", item=self.dump(), output_index=self.output_index)

    def _finish(self, status: str, move: str | None = "close") -> list[Event]:
        """`output_item.done`, by a move of the table; `None` breaks the item off from any state but closed."""
        if move is not None:
            self._go(move)
        elif self.closed:
            raise IllegalOrder(f"{self.kind} {self.id} is already closed after {self._history}")
        self._state = "closed"
        self.status = status
        return [self._outlet.push("response.output_item.done", item=self.dump(), output_index=self.output_index)]


class Message(OutputItem):
    """The assistant's message: parts of text, at most one refusal at the end."""

    kind = "message"

    def __init__(self, outlet: Outlet, item_id: str, output_index: int) -> None:
        super().__init__(outlet, item_id, output_index)
        self.parts: list[dict[str, Any]] = []

    def dump(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": [dict(part) for part in self.parts],
        }

    @property
    def text(self) -> str:
        return "".join(part["text"] for part in self.parts if part["type"] == "output_text")

    def write(self, delta: str) -> list[Event]:
        """Append text; the part opens by itself."""
        events = [] if self._state == "part" else self._part({"type": "output_text", "text": "", "annotations": []})
        part = self.parts[-1]
        self._go("delta")
        part["text"] += delta
        if delta:
            index = len(self.parts) - 1
            events.append(self._event("output_text.delta", content_index=index, delta=delta, logprobs=[]))
        return events

    def refuse(self, reason: str) -> list[Event]:
        """End the text as it is, and add a refusal part."""
        events = self._end_part()
        events += self._part({"type": "refusal", "refusal": ""})
        self._go("delta")
        self.parts[-1]["refusal"] = reason
        events.append(self._event("refusal.delta", content_index=len(self.parts) - 1, delta=reason))
        return events + self._end_part()

    def annotate(self, annotations: Sequence[dict[str, Any]]) -> list[Event]:
        """Add annotations to the text that is open."""
        events: list[Event] = []
        for annotation in annotations:
            self._go("annotate")
            found = self.parts[-1]["annotations"]
            place = {"content_index": len(self.parts) - 1, "annotation_index": len(found)}
            found.append(annotation)
            events.append(self._event("output_text.annotation.added", annotation=annotation, **place))
        return events

    def close(self, status: Status = "completed") -> list[Event]:
        events = self._end_part()
        return events + self._finish(status)

    def abort(self) -> list[Event]:
        return [] if self.closed else self.close("incomplete")

    def _part(self, part: dict[str, Any]) -> list[Event]:
        self._go("part")
        self.parts.append(part)
        return [self._event("content_part.added", content_index=len(self.parts) - 1, part=dict(part))]

    def _end_part(self) -> list[Event]:
        if self._state != "part":
            return []
        self._go("part_done")
        index, part = len(self.parts) - 1, self.parts[-1]
        if part["type"] == "refusal":
            done = self._event("refusal.done", content_index=index, refusal=part["refusal"])
        else:
            done = self._event("output_text.done", content_index=index, text=part["text"], logprobs=[])
        return [done, self._event("content_part.done", content_index=index, part=dict(part))]


class Reasoning(OutputItem):
    """Reasoning text, one part."""

    kind = "reasoning"

    def __init__(self, outlet: Outlet, item_id: str, output_index: int) -> None:
        super().__init__(outlet, item_id, output_index)
        self.text = ""
        self._has_part = False

    def dump(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.text}] if self._has_part else []
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": self.status}

    def write(self, delta: str) -> list[Event]:
        events = []
        if self._state != "part":
            self._go("part")
            self._has_part = True
            part = {"type": "reasoning_text", "text": ""}
            events.append(self._event("content_part.added", content_index=0, part=part))
        self._go("delta")
        self.text += delta
        events.append(self._event("reasoning_text.delta", content_index=0, delta=delta))
        return events

    def close(self, status: Status = "completed") -> list[Event]:
        events = []
        if self._state == "part":
            self._go("part_done")
            events.append(self._event("reasoning_text.done", content_index=0, text=self.text))
            part = {"type": "reasoning_text", "text": self.text}
            events.append(self._event("content_part.done", content_index=0, part=part))
        return events + self._finish(status)

    def abort(self) -> list[Event]:
        return [] if self.closed else self.close("incomplete")


class ToolList(OutputItem):
    """The tools of an MCP server, as the model was offered them."""

    kind = "mcp_list_tools"

    def __init__(self, outlet: Outlet, item_id: str, output_index: int, server_label: str) -> None:
        super().__init__(outlet, item_id, output_index)
        self.server_label = server_label
        self.tools: list[dict[str, Any]] = []
        self.error: str | None = None

    def dump(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "mcp_list_tools",
            "server_label": self.server_label,
            "tools": [dict(tool) for tool in self.tools],
            "error": self.error,
        }

    def open(self) -> list[Event]:
        return [self._added(), self._event("mcp_list_tools.in_progress")]

    def close(self, tools: list[dict[str, Any]]) -> list[Event]:
        self._go("end")
        self.tools = tools
        return [self._event("mcp_list_tools.completed"), *self._finish("completed")]

    def fail(self, error: str) -> list[Event]:
        self._go("end")
        self.error = error
        return [self._event("mcp_list_tools.failed"), *self._finish("failed")]

    def abort(self) -> list[Event]:
        return [] if self.closed else self.fail("the response ended before the tools were listed")


class ApprovalRequest(OutputItem):
    """A hosted call that waits for the user's consent."""

    kind = "mcp_approval_request"

    def __init__(
        self, outlet: Outlet, item_id: str, output_index: int, server_label: str, name: str, arguments: str
    ) -> None:
        super().__init__(outlet, item_id, output_index)
        self.server_label = server_label
        self.name = name
        self.arguments = arguments

    def dump(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "mcp_approval_request",
            "server_label": self.server_label,
            "name": self.name,
            "arguments": self.arguments,
        }

    def close(self) -> list[Event]:
        return self._finish("completed")
