"""Public bug reports of other Responses servers, each as a test: what broke there, and what is right.

The names begin with the report's project and number.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.toolhost.gateway.conftest import Serve, Served
from tests.toolhost.loop.checks import check_response, check_stream
from tests.toolhost.loop.mcp_double import Double

PYTHON: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
LOOKUP: Any = {
    "type": "function",
    "name": "lookup",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
OUTPUTS: Any = ["code_interpreter_call.outputs"]


def lookup(arguments: Any = None) -> dict[str, Any]:
    return {"calls": [{"name": "lookup", "arguments": {"city": "Bern"} if arguments is None else arguments}]}


def run(code: str) -> dict[str, Any]:
    return {"calls": [{"name": "python", "arguments": {"code": code}}]}


async def stream(served: Served, **body: Any) -> list[Any]:
    return [event async for event in await served.client.responses.create(model="fake", stream=True, **body)]


def messages(served: Served, index: int = -1) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.model.requests[index]["messages"]
    return found


async def test_vllm_43244_a_function_call_is_replayed_with_previous_response_id(serve: Serve) -> None:
    served = await serve([lookup(), {"text": "sunny"}])
    first: Any = await served.client.responses.create(model="fake", input="Weather?", tools=[LOOKUP])
    result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sun"}
    await served.client.responses.create(model="fake", input=[result], previous_response_id=first.id, tools=[LOOKUP])
    assert messages(served)[1]["tool_calls"][0]["function"]["name"] == "lookup"
    assert messages(served)[2] == {"role": "tool", "tool_call_id": first.output[0].call_id, "content": "sun"}


async def test_vllm_37697_old_instructions_do_not_leak(serve: Serve) -> None:
    served = await serve([{"text": "a"}, {"text": "b"}])
    first = await served.client.responses.create(model="fake", input="1", instructions="old")
    second = await served.client.responses.create(model="fake", input="2", previous_response_id=first.id)
    assert second.instructions is None
    assert [message["role"] for message in messages(served)] == ["user", "assistant", "user"]


async def test_vllm_45386_a_stream_that_just_stops_is_incomplete(serve: Serve) -> None:
    served = await serve([{"text": "half an ans", "finish": "none"}])
    events = await stream(served, input="Hi")
    assert events[-1].type == "response.incomplete"
    assert check_stream(events) is not None


async def test_vllm_40418_an_error_of_the_model_is_response_failed(serve: Serve) -> None:
    served = await serve([{"text": "broken in the middle", "break_after": 1}])
    events = await stream(served, input="Hi")
    assert events[-1].type == "response.failed"
    assert "error" not in {event.type for event in events}
    check_stream_of_a_failure(events)


def check_stream_of_a_failure(events: list[Any]) -> None:
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.error.code


async def test_vllm_49721_every_end_ends_the_background_readers(serve: Serve) -> None:
    paused = {"text": "one two", "pause": "gate", "pause_at": 1, "chunk": 4}
    served = await serve([paused, {"status": 500}, {"text": "fine"}])
    cancelled = await served.client.responses.create(model="fake", input="1", background=True)
    await served.model.reached("gate")
    readers = [
        asyncio.create_task(_drained(await served.client.responses.retrieve(cancelled.id, stream=True)))
        for _ in range(3)
    ]
    await served.client.responses.cancel(cancelled.id)
    async with asyncio.timeout(20):
        await asyncio.gather(*readers)
        for _ in range(2):
            await stream(served, input="2", background=True)


async def _drained(events: Any) -> int:
    return len([event async for event in events])


async def test_vllm_47112_max_tool_calls_is_enforced(serve: Serve, double: Double) -> None:
    served = await serve([run("1"), run("2"), {"text": "done"}])
    response = await served.client.responses.create(model="fake", input="Go", tools=[PYTHON], max_tool_calls=1)
    assert len(double.host.runs) == 1
    assert response.status == "completed"
    assert response.max_tool_calls == 1


async def test_vllm_47761_unterminated_arguments_are_incomplete_and_history_stays_clean(serve: Serve) -> None:
    served = await serve([lookup('{"city": "Be'), {"text": "sorry"}, {"text": "next"}])
    first = await served.client.responses.create(model="fake", input="Weather?", tools=[LOOKUP])
    assert [item.status for item in first.output] == ["incomplete", "completed"]  # type: ignore[union-attr]
    await served.client.responses.create(model="fake", input="2", previous_response_id=first.id, tools=[LOOKUP])
    for message in messages(served):
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


async def test_vllm_56285_ids_of_the_stream_are_those_of_the_object(serve: Serve) -> None:
    served = await serve([{"reasoning": "hm", **run("print(1)")}, {"text": "one"}])
    final = check_stream(await stream(served, input="Hi", tools=[PYTHON]))
    assert final is not None
    assert (await served.client.responses.retrieve(final.id)).model_dump() == final.model_dump()


async def test_vllm_33089_replayed_items_without_id_or_status_are_accepted_and_filled_in(serve: Serve) -> None:
    served = await serve([{"text": "ok"}])
    items: Any = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "d"},
        {"type": "reasoning", "summary": []},
        {"type": "mcp_call", "server_label": "files", "name": "read", "arguments": "{}", "output": "e"},
        {"type": "code_interpreter_call", "code": "1"},
        {"type": "web_search_call", "action": {"type": "search", "query": "x"}},
    ]
    response = await served.client.responses.create(model="fake", input=items)
    listed = await served.http.get(f"/v1/responses/{response.id}/input_items?order=asc&limit=100")
    assert all(item["id"] for item in listed.json()["data"])
    roles = [message["role"] for message in messages(served)]
    # Without ids nothing says that the last two calls were of one round: they are told as two.
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant", "tool"]


async def test_vllm_30222_the_interpreters_output_is_the_same_in_both_modes(serve: Serve) -> None:
    served = await serve([run("print(7)"), {"text": "7"}, run("print(7)"), {"text": "7"}])
    plain: Any = await served.client.responses.create(model="fake", input="Go", tools=[PYTHON], include=OUTPUTS)
    final: Any = check_stream(await stream(served, input="Go", tools=[PYTHON], include=OUTPUTS))
    assert plain.output[0].outputs == final.output[0].outputs
    assert plain.output[0].outputs[0].logs == "7\n"


async def test_sglang_38002_a_foreground_response_cannot_be_cancelled(serve: Serve) -> None:
    served = await serve([{"text": "a b c", "pause": "gate", "pause_at": 1, "chunk": 2}])
    events = aiter(await served.client.responses.create(model="fake", input="Hi", stream=True))
    first: Any = await anext(events)
    await served.model.reached("gate")
    with pytest.raises(openai.BadRequestError):
        await served.client.responses.cancel(first.response.id)
    served.model.release("gate")
    assert [event async for event in events][-1].type == "response.completed"


async def test_sglang_25302_usage_is_true_and_sums_over_rounds(serve: Serve) -> None:
    served = await serve([run("1"), {"text": "one", "input_tokens": 20, "output_tokens": 7}])
    response = await served.client.responses.create(model="fake", input="Hi", tools=[PYTHON])
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (30, 12)


async def test_ogx_4781_an_invented_tool_goes_back_and_ends_visibly(serve: Serve) -> None:
    invented = {"calls": [{"name": "teleport", "arguments": {}}]}
    served = await serve([invented] * 3)
    events = await stream(served, input="Hi", tools=[PYTHON])
    assert events[-1].type == "response.failed"
    assert "teleport" in messages(served)[-1]["content"]
    assert len(served.model.requests) == 3


async def test_ogx_4430_parallel_arguments_are_kept_apart(serve: Serve) -> None:
    calls = [{"name": "lookup", "arguments": {"n": n, "x": "y" * 20}, "id": f"c{n}"} for n in range(3)]
    served = await serve([{"calls": calls, "interleave": True}])
    final: Any = check_stream(await stream(served, input="Hi", tools=[LOOKUP]))
    assert [json.loads(item.arguments)["n"] for item in final.output] == [0, 1, 2]


async def test_ogx_5309_output_text_done_is_sent(serve: Serve) -> None:
    served = await serve([{"text": "all of it"}])
    [done] = [event for event in await stream(served, input="Hi") if event.type == "response.output_text.done"]
    assert done.text == "all of it"


async def test_ogx_3443_nothing_runs_before_approval(serve: Serve, double: Double) -> None:
    served = await serve([{"calls": [{"name": "files_write", "arguments": {}}]}])
    files: Any = {"type": "mcp", "server_label": "files", "require_approval": "always"}
    response = await served.client.responses.create(model="fake", input="Hi", tools=[files])
    assert response.output[-1].type == "mcp_approval_request"
    assert not double.host.runs


async def test_ogx_5458_reasoning_comes_before_its_call(serve: Serve) -> None:
    served = await serve([{"reasoning": "I should look", **lookup()}])
    final: Any = check_stream(await stream(served, input="Hi", tools=[LOOKUP]))
    assert [item.type for item in final.output] == ["reasoning", "function_call"]


async def test_ogx_2522_a_function_output_pairs_with_the_stored_call(serve: Serve) -> None:
    served = await serve([lookup(), {"text": "ok"}])
    first: Any = await served.client.responses.create(model="fake", input="Hi", tools=[LOOKUP])
    result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sun"}
    second = await served.client.responses.create(model="fake", input=[result], previous_response_id=first.id)
    assert second.output_text == "ok"


async def test_litellm_40118_one_lifecycle_and_no_colliding_indexes_over_rounds(serve: Serve) -> None:
    served = await serve([{"text": "first", **run("1")}, {"text": "second", **run("2")}, {"text": "third"}])
    events = await stream(served, input="Hi", tools=[PYTHON])
    assert check_stream(events) is not None
    assert [event.type for event in events].count("response.created") == 1


async def test_litellm_35131_no_row_stays_queued(serve: Serve) -> None:
    served = await serve([{"text": "a", "keep": True}], max_background=1)
    queued = [await served.client.responses.create(model="fake", input="Hi", background=True) for _ in range(5)]
    for one in queued:
        await _drained(await served.client.responses.retrieve(one.id, stream=True))
        assert (await served.client.responses.retrieve(one.id)).status == "completed"


async def test_litellm_19317_no_message_is_sent_twice(serve: Serve) -> None:
    served = await serve([run("1"), {"text": "a"}, run("2"), {"text": "b"}, {"text": "c"}])
    previous = None
    for text in ("1", "2", "3"):
        response = await served.client.responses.create(
            model="fake", input=text, tools=[PYTHON], previous_response_id=previous
        )
        previous = response.id
    assert [message["role"] for message in messages(served)] == [
        *("user", "assistant", "tool", "assistant"),
        *("user", "assistant", "tool", "assistant"),
        "user",
    ]


async def test_llamacpp_20607_every_event_has_its_index_and_id(serve: Serve) -> None:
    served = await serve([{"reasoning": "hm", "text": "a"}])
    for event in await stream(served, input="Hi"):
        if not hasattr(event, "response"):
            assert event.output_index is not None
            assert getattr(event, "item_id", None) or event.item.id


async def test_hermes_15026_a_disconnect_does_not_lose_an_exposed_id(serve: Serve) -> None:
    served = await serve([{"text": "a b c", "pause": "gate"}])
    events = await served.client.responses.create(model="fake", input="Hi", stream=True)
    first: Any = await anext(aiter(events))
    await events.close()
    assert (await served.client.responses.retrieve(first.response.id)).id == first.response.id


async def test_lightspeed_2707_the_end_is_stored_before_it_is_sent(serve: Serve) -> None:
    served = await serve([{"text": "a"}])
    async for event in await served.client.responses.create(model="fake", input="Hi", stream=True):
        if event.type == "response.completed":
            stored = await served.client.responses.retrieve(event.response.id)
            assert stored.model_dump() == event.response.model_dump()


async def test_praxis_560_a_get_shows_the_current_state(serve: Serve) -> None:
    served = await serve([{"text": "a b c d", "pause": "gate", "pause_at": 1, "chunk": 2}])
    queued = await served.client.responses.create(model="fake", input="Hi", background=True)
    await served.model.reached("gate")
    running = await served.client.responses.retrieve(queued.id)
    served.model.release("gate")
    await _drained(await served.client.responses.retrieve(queued.id, stream=True))
    ended = await served.client.responses.retrieve(queued.id)
    assert [queued.status, running.status, ended.status] == ["queued", "in_progress", "completed"]
    assert (running.output_text, ended.output_text) == ("a ", "a b c d")
    check_response(ended)


async def test_neon_367_an_item_reference_that_leads_nowhere_is_a_clear_400(serve: Serve) -> None:
    served = await serve([])
    with pytest.raises(openai.BadRequestError, match="msg_nothing") as caught:
        reference: Any = [{"type": "item_reference", "id": "msg_nothing"}]
        await served.client.responses.create(model="fake", input=reference)
    assert caught.value.param == "input"


async def test_mlx_1046_previous_response_id_is_honoured_or_refused(serve: Serve) -> None:
    served = await serve([{"text": "a"}, {"text": "b"}])
    first = await served.client.responses.create(model="fake", input="1")
    await served.client.responses.create(model="fake", input="2", previous_response_id=first.id)
    assert [message["content"] for message in messages(served)] == ["1", "a", "2"]
    with pytest.raises(openai.BadRequestError):
        await served.client.responses.create(model="fake", input="2", previous_response_id="resp_x")


async def test_openai_agents_263_tool_choice_counts_for_the_first_round_only(serve: Serve) -> None:
    served = await serve([run("1"), {"text": "done"}])
    await served.client.responses.create(model="fake", input="Hi", tools=[PYTHON], tool_choice="required")
    assert [request["tool_choice"] for request in served.model.requests] == ["required", "auto"]
