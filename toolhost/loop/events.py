"""The response being written: numbers events, validates them, and keeps the object that they describe.

Above: the driver, which calls methods and passes on what they return. Below: `output_items`. An illegal order is not
expressible: items come only from here, each is its own state machine, and after the end nothing can be written.
Types, names and order are those of the `openai` package (3.x) and its API reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from toolhost.loop.call_items import CodeCall, FunctionCall, McpCall, SearchCall
from toolhost.loop.errors import IllegalOrder
from toolhost.loop.ids import IdSource
from toolhost.loop.output_items import ApprovalRequest, Event, Message, OutputItem, Reasoning, ToolList

ItemT = TypeVar("ItemT", bound=OutputItem)

Ending = Literal["completed", "incomplete", "failed", "cancelled"]


@functools.cache
def event_classes() -> Mapping[str, type[BaseModel]]:
    """The class of each type of event. A class validates twenty times as fast as the union of all of them."""
    members = get_args(get_args(ResponseStreamEvent)[0])
    return {name: one for one in members for name in get_args(one.model_fields["type"].annotation)}


def wire_json(value: BaseModel) -> str:
    """An event or a response as JSON for the wire: the API's names, and exactly the keys that were written.

    The package's own defaults are left out: it dumps some of them under Python names (`async_`), which no client knows.
    """
    return value.model_dump_json(by_alias=True, exclude_unset=True)


class Emitter:
    """One response's events.

    `fields` are further keys of the response object (`instructions`, `tools`, `metadata`, …); `clock` gives seconds
    since 1970.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        ids: IdSource,
        clock: Callable[[], float],
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.response_id = response_id
        self._ids = ids
        self._clock = clock
        self._sequence = 0
        self._items: list[OutputItem] = []
        self._phase: Literal["new", "running", "ended"] = "new"
        self._object: dict[str, Any] = {
            "background": False,
            "conversation": None,
            "frequency_penalty": 0.0,
            "instructions": None,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "presence_penalty": 0.0,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "truncation": "disabled",
            **(fields or {}),
            "id": response_id,
            "object": "response",
            "created_at": int(clock()),
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "usage": None,
        }

    @property
    def ended(self) -> bool:
        return self._phase == "ended"

    @property
    def items(self) -> list[OutputItem]:
        return list(self._items)

    def snapshot(self) -> Response:
        """The response as it stands; a copy that later events do not change."""
        return Response.model_validate({**self._object, "output": [item.dump() for item in self._items]})

    def push(self, type_: str, **fields: Any) -> Event:
        if self._phase != "running":
            raise IllegalOrder(f"{type_} while the response is {self._phase}")
        values = {"type": type_, "sequence_number": self._sequence, **fields}
        event = event_classes()[type_].model_validate(values)
        self._sequence += 1
        return event

    def begin(self) -> list[Event]:
        """`response.created` and `response.in_progress`."""
        if self._phase != "new":
            raise IllegalOrder(f"the response is {self._phase}, it cannot begin")
        self._phase = "running"
        created = self.push("response.created", response=self.snapshot())
        return [created, self.push("response.in_progress", response=self.snapshot())]

    def message(self) -> tuple[Message, list[Event]]:
        return self._open(Message(self, self._ids.new("msg"), len(self._items)))

    def reasoning(self) -> tuple[Reasoning, list[Event]]:
        return self._open(Reasoning(self, self._ids.new("rs"), len(self._items)))

    # Calls: the caller mints their ids, those of a call and of a round together (`transcript.call_suffix`).

    def function_call(self, item_id: str, call_id: str, name: str) -> tuple[FunctionCall, list[Event]]:
        return self._open(FunctionCall(self, item_id, len(self._items), call_id, name))

    def mcp_call(self, item_id: str, label: str, name: str, approval: str | None = None) -> tuple[McpCall, list[Event]]:
        return self._open(McpCall(self, item_id, len(self._items), label, name, approval))

    def code_call(self, item_id: str, container_id: str) -> tuple[CodeCall, list[Event]]:
        return self._open(CodeCall(self, item_id, len(self._items), container_id))

    def search_call(self, item_id: str, action: dict[str, Any]) -> tuple[SearchCall, list[Event]]:
        return self._open(SearchCall(self, item_id, len(self._items), action))

    def approval_request(
        self, item_id: str, label: str, name: str, arguments: str
    ) -> tuple[ApprovalRequest, list[Event]]:
        return self._open(ApprovalRequest(self, item_id, len(self._items), label, name, arguments))

    def tool_list(self, label: str) -> tuple[ToolList, list[Event]]:
        return self._open(ToolList(self, self._ids.new("mcpl"), len(self._items), label))

    def abort_items(self) -> list[Event]:
        """End every open item as incomplete, in the order of their indexes."""
        return [event for item in self._items for event in item.abort()]

    def finish(
        self,
        ending: Ending,
        *,
        usage: Mapping[str, Any] | None = None,
        reason: Literal["max_output_tokens", "content_filter"] | None = None,
        error: tuple[str, str] | None = None,
    ) -> list[Event]:
        """End the response: open items end incomplete, then the terminal event (a cancelled response has none).

        `error` is (code, message) of a failed response, `reason` that of an incomplete one.
        """
        events = self.abort_items()
        self._object["status"] = ending
        self._object["usage"] = usage
        if ending == "completed":
            self._object["completed_at"] = int(self._clock())
        if ending == "incomplete":
            self._object["incomplete_details"] = {"reason": reason}
        if error is not None:
            self._object["error"] = {"code": error[0], "message": error[1]}
        if ending != "cancelled":
            events.append(self.push(f"response.{ending}", response=self.snapshot()))
        self._phase = "ended"
        return events

    def _open(self, item: ItemT) -> tuple[ItemT, list[Event]]:
        if self._phase != "running":
            raise IllegalOrder(f"a {item.kind} was opened while the response is {self._phase}")
        self._items.append(item)
        return item, item.open()
