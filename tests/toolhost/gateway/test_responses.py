"""OpenAI's own client against the gateway: create, stream, retrieve, delete, input items, and the chain's session."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.toolhost.gateway.conftest import Serve
from tests.toolhost.loop.checks import ADAPTER, assert_no_extras, check_response, check_stream
from tests.toolhost.loop.mcp_double import Double

PYTHON: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}
SET = {"calls": [{"name": "python", "arguments": {"code": "x = 41"}}]}
READ = {"calls": [{"name": "python", "arguments": {"code": "print(globals().get('x', -1) + 1)"}}]}


async def test_a_plain_answer_is_an_object_with_every_key(serve: Serve) -> None:
    served = await serve([{"text": "Hello there"}])
    response = await served.client.responses.create(model="fake", input="Hi", metadata={"a": "b"})
    check_response(response)
    assert response.output_text == "Hello there"
    assert response.status == "completed"
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.total_tokens == 15
    again = await served.client.responses.retrieve(response.id)
    assert again.model_dump() == response.model_dump()


async def test_a_stream_is_valid_and_its_end_is_what_is_retrieved(serve: Serve) -> None:
    served = await serve([{"text": "Hello there, friend"}])
    stream = await served.client.responses.create(model="fake", input="Hi", stream=True)
    events = [event async for event in stream]
    final = check_stream(events)
    assert final is not None
    again = await served.client.responses.retrieve(final.id)
    assert again.model_dump() == final.model_dump()


async def test_every_frame_is_one_event_and_the_stream_ends_with_done(serve: Serve) -> None:
    served = await serve([{"text": "one two three"}])
    async with served.http.stream(
        "POST", "/v1/responses", json={"model": "fake", "input": "Hi", "stream": True}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"].startswith("req_")
        text = (await answer.aread()).decode()
    frames = text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    for frame in frames[:-1]:
        head, data = frame.split("\n")
        event = ADAPTER.validate_json(data.removeprefix("data: "), strict=True)
        assert head == f"event: {event.type}"


async def test_turn_two_sees_the_variables_of_turn_one(serve: Serve, double: Double) -> None:
    served = await serve([SET, {"text": "set"}, READ, {"text": "It is 42"}])
    first = await served.client.responses.create(model="fake", input="Set x", tools=[PYTHON])
    second = await served.client.responses.create(
        model="fake",
        input="Read x",
        tools=[PYTHON],
        previous_response_id=first.id,
        include=["code_interpreter_call.outputs"],
    )
    check_response(second)
    call = second.output[0]
    assert call.type == "code_interpreter_call"
    assert call.outputs is not None
    assert call.outputs[0].model_dump()["logs"] == "42\n"
    assert call.container_id == first.output[0].container_id  # type: ignore[union-attr]
    assert second.previous_response_id == first.id
    messages = served.model.requests[-1]["messages"]
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]


async def test_a_second_child_is_a_branch_with_a_fresh_session_and_is_told_so(serve: Serve, double: Double) -> None:
    served = await serve([SET, {"text": "set"}, READ, {"text": "42"}, READ, {"text": "gone"}])
    first = await served.client.responses.create(model="fake", input="Set x", tools=[PYTHON])
    await served.client.responses.create(model="fake", input="A", tools=[PYTHON], previous_response_id=first.id)
    second = await served.client.responses.create(
        model="fake",
        input="B",
        tools=[PYTHON],
        previous_response_id=first.id,
        include=["code_interpreter_call.outputs"],
    )
    assert second.output[0].container_id != first.output[0].container_id  # type: ignore[union-attr]
    told = [message for message in served.model.requests[-1]["messages"] if message["role"] == "system"]
    assert "fresh session" in told[0]["content"]
    texts = [message["content"] for message in served.model.requests[-1]["messages"] if message["role"] == "user"]
    assert texts == ["Set x", "B"]


async def test_input_items_are_listed_in_pages(serve: Serve) -> None:
    served = await serve([{"text": "ok"}])
    given: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
    ]
    response = await served.client.responses.create(model="fake", input=given)
    page = await served.client.responses.input_items.list(response.id, order="asc", limit=2)
    assert [item.type for item in page.data] == ["message", "message"]
    assert page.has_more
    everything = [item async for item in served.client.responses.input_items.list(response.id, order="asc", limit=2)]
    assert [item.content[0].text for item in everything] == ["one", "two", "three"]  # type: ignore[union-attr]
    raw = await served.http.get(f"/v1/responses/{response.id}/input_items")
    from openai.types.responses import ResponseItemList

    assert_no_extras(ResponseItemList.model_validate_json(raw.content, strict=True))


async def test_a_deleted_response_is_gone_and_cannot_be_continued(serve: Serve) -> None:
    served = await serve([{"text": "ok"}])
    response = await served.client.responses.create(model="fake", input="Hi")
    await served.client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.responses.create(model="fake", input="Hi", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_what_is_not_stored_cannot_be_retrieved_or_continued(serve: Serve) -> None:
    served = await serve([{"text": "ok"}])
    response = await served.client.responses.create(model="fake", input="Hi", store=False)
    check_response(response)
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError):
        await served.client.responses.create(model="fake", input="Hi", previous_response_id=response.id)


async def test_streaming_and_plain_are_equal_objects(serve: Serve, double: Double) -> None:
    script = [
        {"reasoning": "hm", **SET},
        {"text": "Setting", "calls": [{"name": "lookup", "arguments": {"city": "Bern"}}]},
    ]
    function: Any = {
        "type": "function",
        "name": "lookup",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
    served = await serve([*script, *script])
    body: Any = {
        "model": "fake",
        "input": "Go",
        "tools": [PYTHON, function],
        "include": ["code_interpreter_call.outputs"],
    }
    plain = await served.client.responses.create(**body)
    stream = await served.client.responses.create(**body, stream=True)
    final = check_stream([event async for event in stream])
    assert final is not None
    assert _without_ids(plain) == _without_ids(final)


def _without_ids(response: Response) -> dict[str, Any]:
    data = response.model_dump()
    for item in data["output"]:
        for key in ("id", "call_id", "container_id"):
            item.pop(key, None)
    return {key: value for key, value in data.items() if key not in ("id", "created_at", "completed_at")}


async def test_a_stored_row_exists_before_created_is_sent(serve: Serve) -> None:
    served = await serve([{"text": "slow answer", "pause": "gate"}])
    stream = await served.client.responses.create(model="fake", input="Hi", stream=True)
    first = await anext(aiter(stream))
    assert first.type == "response.created"
    found = await served.client.responses.retrieve(first.response.id)
    assert found.status == "in_progress"
    served.model.release("gate")
    async for _ in stream:
        pass
    assert (await served.client.responses.retrieve(first.response.id)).status == "completed"


async def test_a_client_that_leaves_cancels_its_foreground_response(serve: Serve) -> None:
    served = await serve([{"text": "slow answer", "pause": "gate", "pause_at": 1}])
    stream = await served.client.responses.create(model="fake", input="Hi", stream=True)
    events = aiter(stream)
    first = await anext(events)
    assert first.type == "response.created"
    await served.model.reached("gate")
    await stream.close()
    await served.model.left()
    run = served.gateway.runs.get(first.response.id)
    if run is not None:
        await run.done
    found = await served.client.responses.retrieve(first.response.id)
    assert found.status == "cancelled"
    assert found.output[0].status == "incomplete"  # type: ignore[union-attr]


async def test_models_are_those_of_the_model_server(serve: Serve) -> None:
    served = await serve([])
    assert [model.id async for model in served.client.models.list()] == ["fake"]
    assert (await served.client.models.retrieve("fake")).owned_by == "toolhost"
    with pytest.raises(openai.NotFoundError):
        await served.client.models.retrieve("other")


async def test_a_request_id_of_the_client_comes_back(serve: Serve) -> None:
    served = await serve([])
    answer: httpx.Response = await served.http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
