"""What must hold for every event stream and every response object, whatever the run was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pydantic
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent

from toolhost.loop.events import wire_json

ADAPTER: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
RESPONSE_KEYS = {
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "conversation",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
}


def check_stream(events: Sequence[Any], *, cancelled: bool = False) -> Response | None:
    """Validate a whole stream strictly; the final object (None for a cancelled one)."""
    assert events[0].type == "response.created"
    assert events[1].type == "response.in_progress"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        strict = ADAPTER.validate_json(wire_json(event), strict=True)
        assert type(strict) is type(event)
        assert_no_extras(strict)
    ids = {event.response.id for event in events if hasattr(event, "response")}
    assert len(ids) == 1
    assert [event.type for event in events if event.type in TERMINAL] == ([] if cancelled else [events[-1].type])
    items = check_items(events)
    if cancelled:
        return None
    response: Response = events[-1].response
    check_response(response)
    assert [item.model_dump() for item in response.output] == [item.model_dump() for item in items]
    return response


def check_items(events: Iterable[Any]) -> list[Any]:
    """Every item added is done, under the same id and index, and its deltas make up what is done."""
    added: dict[int, Any] = {}
    done: dict[int, Any] = {}
    deltas: dict[tuple[str, int, int], str] = {}
    whole_ones: set[tuple[str, int, int]] = set()
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(added)
            added[event.output_index] = event.item
        elif event.type == "response.output_item.done":
            assert event.output_index not in done
            assert event.item.id == added[event.output_index].id
            done[event.output_index] = event.item
        elif hasattr(event, "item_id"):
            assert event.output_index not in done, f"{event.type} after the item was done"
            assert added[event.output_index].id == event.item_id
            key = (event.type.rpartition(".")[0], event.output_index, getattr(event, "content_index", 0))
            if event.type.endswith(".delta"):
                deltas[key] = deltas.get(key, "") + event.delta
            elif event.type.endswith(".done") and "content_part" not in event.type:
                whole = next(
                    getattr(event, name) for name in ("text", "arguments", "code", "refusal") if hasattr(event, name)
                )
                assert deltas.get(key, "") == whole
                whole_ones.add(key)
    for kind, index, part in deltas.keys() - whole_ones:
        assert done[index].status == "incomplete", f"{kind} of part {part} has no end"
    assert added.keys() == done.keys()
    assert len({item.id for item in done.values()}) == len(done)
    return [done[index] for index in sorted(done)]


def check_response(response: Any) -> None:
    data = json.loads(wire_json(response))
    assert data.keys() >= RESPONSE_KEYS
    assert_no_extras(Response.model_validate_json(wire_json(response), strict=True))
    assert data["usage"]["input_tokens_details"].keys() >= {"cached_tokens"}
    assert data["usage"]["output_tokens_details"].keys() >= {"reasoning_tokens"}
    assert data["usage"]["total_tokens"] == data["usage"]["input_tokens"] + data["usage"]["output_tokens"]


EXTRA_KEYS = {"presence_penalty", "frequency_penalty", "store"}
"""Keys of the API's object that the package's type does not have (it keeps them as extras)."""


def assert_no_extras(value: Any) -> None:
    """No model in a value carries a key that its type does not know."""
    if isinstance(value, pydantic.BaseModel):
        extras = set(value.model_extra or ()) - (EXTRA_KEYS if isinstance(value, Response) else set())
        assert not extras, f"{type(value).__name__} has unknown keys {extras}"
        for name in type(value).model_fields:
            assert_no_extras(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            assert_no_extras(one)
