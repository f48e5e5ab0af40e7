"""The emitter: whatever is asked of it, what it lets out is a legal stream."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.toolhost.loop.checks import check_items, check_stream
from toolhost.loop.errors import IllegalOrder
from toolhost.loop.events import Emitter
from toolhost.loop.ids import CountingIds


def emitter() -> Emitter:
    return Emitter("resp_1", "fake", CountingIds(), lambda: 1_800_000_000.0)


OPENERS: dict[str, Any] = {
    "message": lambda one: one.message(),
    "reasoning": lambda one: one.reasoning(),
    "function_call": lambda one: one.function_call(f"fc_{len(one.items)}", "call_1", "f"),
    "mcp_call": lambda one: one.mcp_call(f"mcp_{len(one.items)}", "files", "read"),
    "code_call": lambda one: one.code_call(f"ci_{len(one.items)}", "resp_1"),
    "search_call": lambda one: one.search_call(f"ws_{len(one.items)}", {"type": "search", "query": "q"}),
    "tool_list": lambda one: one.tool_list("files"),
    "approval_request": lambda one: one.approval_request(f"mcpr_{len(one.items)}", "files", "read", "{}"),
}
MOVES: dict[str, Any] = {
    "write": lambda item: item.write("ab"),
    "refuse": lambda item: item.refuse("no"),
    "seal": lambda item: item.seal(),
    "run": lambda item: item.run(),
    "close": lambda item: item.close(),
    "close with text": lambda item: item.close("done"),
    "close with nothing": lambda item: item.close(None),
    "close with a list": lambda item: item.close([]),
    "fail": lambda item: item.fail(),
    "fail with an error": lambda item: item.fail({"type": "http_error", "code": 500, "message": "no"}),
    "fail with text": lambda item: item.fail("no"),
    "abort": lambda item: item.abort(),
}
STEPS = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(sorted(OPENERS))),
    st.tuples(st.sampled_from(sorted(MOVES)), st.integers(0, 4)),
)


def fits(kind: str, move: str) -> bool:
    """Moves with arguments of the wrong shape are the type checker's to refuse, not the emitter's."""
    shapes = {
        "message": {"write", "refuse", "close", "abort"},
        "reasoning": {"write", "close", "abort"},
        "function_call": {"write", "seal", "close", "abort"},
        "mcp_call": {"write", "seal", "close with text", "fail with an error", "abort"},
        "code_interpreter_call": {"write", "seal", "run", "close with nothing", "close with a list", "fail", "abort"},
        "web_search_call": {"run", "close", "fail", "abort"},
        "mcp_list_tools": {"close with a list", "fail with text", "abort"},
        "mcp_approval_request": {"close", "abort"},
    }
    return move in shapes[kind]


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=25), st.sampled_from(["completed", "incomplete", "failed", "cancelled"]))
def test_any_order_of_demands_gives_a_legal_stream_or_a_refusal(steps: list[tuple[str, Any]], ending: Any) -> None:
    one = emitter()
    events = one.begin()
    items: list[Any] = []
    for step, argument in steps:
        if step == "open":
            item, opened = OPENERS[argument](one)
            items.append(item)
            events += opened
        elif items and fits(items[argument % len(items)].kind, step):
            before = one.snapshot()
            try:
                events += MOVES[step](items[argument % len(items)])
            except IllegalOrder:
                assert one.snapshot() == before, "a refused demand changes nothing"
    usage = {
        "input_tokens": 1,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 2,
    }
    error = ("server_error", "broke") if ending == "failed" else None
    events += one.finish(ending, usage=usage, error=error)
    check_stream(events, cancelled=ending == "cancelled")
    assert len(check_items(events)) == len(items)
    assert one.snapshot().status == ending


def test_nothing_can_be_written_before_the_beginning_or_after_the_end() -> None:
    one = emitter()
    with pytest.raises(IllegalOrder):
        one.message()
    one.begin()
    with pytest.raises(IllegalOrder):
        one.begin()
    message, _ = one.message()
    one.finish("completed")
    for demand in (one.message, one.begin, lambda: message.write("late"), lambda: one.finish("failed")):
        with pytest.raises(IllegalOrder):
            demand()


def test_an_event_is_not_changed_by_what_comes_later() -> None:
    one = emitter()
    one.begin()
    message, opened = one.message()
    message.write("late")
    assert opened[0].item.content == []
    before = one.snapshot()
    with contextlib.suppress(IllegalOrder):
        message.close()
    assert before.output[0].status == "in_progress"
