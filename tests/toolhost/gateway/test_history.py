"""What the model is sent: three forms of one talk are equal, reasoning travels sealed, long histories are cut whole."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.toolhost.gateway.conftest import Serve
from tests.toolhost.loop.checks import check_response
from toolhost.loop import fake_model
from toolhost.loop.chat_messages import items_of_chat
from toolhost.loop.driver import LoopDriver
from toolhost.loop.errors import RequestError
from toolhost.loop.models.registry import connect
from toolhost.loop.request import LoopRequest

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = {"calls": [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "call_weather"}]}
ANSWER = {"text": "It is sunny in Paris."}
LAST = {"text": "Take no umbrella."}


async def test_the_three_forms_of_one_talk_give_the_model_identical_messages(serve: Serve) -> None:
    script = [CALL, ANSWER, LAST]
    served = await serve([*script, *script, LAST])
    create = served.client.responses.create

    # By previous_response_id.
    first = await create(model="fake", input="Weather in Paris?", tools=[WEATHER])
    call: Any = first.output[0]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = await create(model="fake", input=[result], tools=[WEATHER], previous_response_id=first.id)
    await create(model="fake", input="Umbrella?", tools=[WEATHER], previous_response_id=second.id)
    chained = [request["messages"] for request in served.model.requests]

    # As replayed items.
    served.model.requests.clear()
    items: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    first = await create(model="fake", input=items, tools=[WEATHER])
    items += [*(item.model_dump(exclude_none=True) for item in first.output), result]
    second = await create(model="fake", input=items, tools=[WEATHER])
    items += [*(item.model_dump(exclude_none=True) for item in second.output), {"role": "user", "content": "Umbrella?"}]
    await create(model="fake", input=items, tools=[WEATHER], store=False)
    replayed = [request["messages"] for request in served.model.requests]
    assert replayed == chained

    # As Chat Completions messages through the driver, as an application would keep them.
    arguments = json.dumps({"city": "Paris"})
    function = {"name": "get_weather", "arguments": arguments}
    asked = {"role": "user", "content": "Weather in Paris?"}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_weather", "type": "function", "function": function}],
    }
    told = {"role": "tool", "tool_call_id": "call_weather", "content": "sunny"}
    answered = {"role": "assistant", "content": "It is sunny in Paris."}
    talks = [
        [asked],
        [asked, called, told],
        [asked, called, told, answered, {"role": "user", "content": "Umbrella?"}],
    ]
    async with fake_model.serving(script) as (model, url):
        driver = LoopDriver(connect("chat", url, timeout=30))
        for messages in talks:
            run = await driver.start(LoopRequest("fake", items_of_chat(messages), tools=[WEATHER]))
            assert (await run.result()).response.status == "completed"
        await driver.model.aclose()
    assert [request["messages"] for request in model.requests] == chained == talks


def test_chat_messages_with_images_and_reasoning_are_items_and_broken_ones_are_named() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    items = items_of_chat(
        [
            {"role": "user", "content": [{"type": "text", "text": "See"}, image]},
            {"role": "assistant", "reasoning_content": "Hm.", "content": "I see."},
        ]
    )
    assert [item["type"] for item in items] == ["message", "reasoning", "message"]
    assert items[0]["content"][1]["image_url"] == "data:image/png;base64,AA"
    wrong: list[dict[str, Any]] = [
        {"role": "tool", "content": "x"},
        {"role": "pirate", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": [{"type": "audio"}]},
        {"role": "user", "content": 7},
        {"role": "assistant", "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "tool_calls": {}, "content": None},
        {"role": "assistant", "tool_calls": "x"},
    ]
    for message in wrong:
        with pytest.raises(RequestError, match=r"messages\[1\]"):
            items_of_chat([{"role": "user", "content": "Hi"}, message])


async def test_reasoning_travels_sealed_and_comes_back_to_the_model(serve: Serve) -> None:
    served = await serve([{"reasoning": "secret thought", "text": "Hello"}, {"text": "again"}, {"text": "third"}])
    first = await served.client.responses.create(
        model="fake", input="Hi", store=False, include=["reasoning.encrypted_content"]
    )
    check_response(first)
    reasoning: Any = first.output[0]
    assert reasoning.encrypted_content
    assert "secret" not in reasoning.encrypted_content
    item = reasoning.model_dump(exclude_none=True)
    replay = [{"role": "user", "content": "Hi"}, item, first.output[1].model_dump(), {"role": "user", "content": "2"}]
    await served.client.responses.create(model="fake", input=replay, store=False)  # type: ignore[arg-type]
    assert served.model.requests[-1]["messages"][1] == {
        "role": "assistant",
        "content": "Hello",
        "reasoning_content": "secret thought",
    }
    text = item["encrypted_content"]
    for place in (6, len(text) // 2, len(text) - 8):
        changed = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        broken = [replay[0], {**item, "encrypted_content": changed}, *replay[2:]]
        with pytest.raises(openai.BadRequestError) as caught:
            await served.client.responses.create(model="fake", input=broken, store=False)  # type: ignore[arg-type]
        assert caught.value.param == "input"
    forged = [
        replay[0],
        {
            "type": "reasoning",
            "replay": {"dialect": "chat", "field": "role"},
            "content": [{"type": "reasoning_text", "text": "x"}],
        },
        *replay[2:],
    ]
    await served.client.responses.create(model="fake", input=forged, store=False)  # type: ignore[arg-type]
    assert served.model.requests[-1]["messages"][1]["role"] == "assistant"


async def test_an_item_reference_stands_for_the_item(serve: Serve) -> None:
    served = await serve([{"text": "The code is 17."}, {"text": "ok"}])
    first = await served.client.responses.create(model="fake", input="Code?")
    reference: Any = [
        {"role": "user", "content": "Code?"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "Again"},
    ]
    await served.client.responses.create(model="fake", input=reference)
    texts = [message["content"] for message in served.model.requests[-1]["messages"]]
    assert texts == ["Code?", "The code is 17.", "Again"]


async def test_instructions_are_not_inherited_and_system_items_are(serve: Serve) -> None:
    served = await serve([{"text": "a"}, {"text": "b"}])
    given: Any = [{"role": "system", "content": "genuine"}, {"role": "user", "content": "1"}]
    first = await served.client.responses.create(model="fake", input=given, instructions="old")
    await served.client.responses.create(model="fake", input="2", instructions="new", previous_response_id=first.id)
    messages = [(message["role"], message["content"]) for message in served.model.requests[-1]["messages"]]
    assert messages == [("system", "new"), ("system", "genuine"), ("user", "1"), ("assistant", "a"), ("user", "2")]


async def test_a_long_chain_is_cut_by_whole_turns_and_the_model_writes_the_summary(serve: Serve) -> None:
    long = "word " * 200
    summary = {"text": "SUMMARY OF OLD TURNS", "when": "^Summarise this conversation"}
    served = await serve(
        [CALL, {"text": f"sunny {long}"}, {"text": f"two {long}"}, summary, {"text": "three"}, {"text": "four"}],
        context_tokens=900,
    )
    create = served.client.responses.create
    first = await create(model="fake", input=f"Weather? {long}", tools=[WEATHER])
    result: Any = {"type": "function_call_output", "call_id": "call_weather", "output": "sunny"}
    second = await create(model="fake", input=[result], tools=[WEATHER], previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="fake", input=f"2 {long}", previous_response_id=second.id)
    assert caught.value.code == "context_length_exceeded"
    third = await create(
        model="fake", input="2", previous_response_id=second.id, truncation="auto", max_output_tokens=100
    )
    fourth = await create(
        model="fake", input="3", previous_response_id=third.id, truncation="auto", max_output_tokens=100
    )
    assert fourth.output_text in ("three", "four")
    messages = served.model.requests[-1]["messages"]
    assert "SUMMARY OF OLD TURNS" in messages[0]["content"]
    tool_ids = {message["tool_call_id"] for message in messages if message["role"] == "tool"}
    call_ids = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    assert tool_ids == call_ids
    last = await create(
        model="fake", input="4", previous_response_id=fourth.id, truncation="auto", max_output_tokens=100
    )
    assert last.status == "completed"
    assert sum("Summarise this" in json.dumps(one) for one in served.model.requests) == 1


async def test_after_expiry_the_model_is_told_that_the_session_is_gone(serve: Serve) -> None:
    from tests.toolhost.gateway.test_responses import PYTHON, READ, SET

    served = await serve([SET, {"text": "set"}, READ, {"text": "gone"}], session_ttl_s=0.001)
    first = await served.client.responses.create(model="fake", input="Set x", tools=[PYTHON])
    second = await served.client.responses.create(
        model="fake", input="Read x", tools=[PYTHON], previous_response_id=first.id
    )
    told = [message["content"] for message in served.model.requests[-1]["messages"] if message["role"] == "system"]
    assert "expired" in told[0]
    assert second.output[0].container_id != first.output[0].container_id  # type: ignore[union-attr]
