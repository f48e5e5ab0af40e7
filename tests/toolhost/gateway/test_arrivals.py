"""What applications answer to their functions is judged as every tool's result is (the acceptance table)."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.toolhost.gateway.conftest import Serve, Served
from tests.toolhost.gateway.test_cases import LOOKUP, lookup, run
from tests.toolhost.gateway.test_responses import PYTHON

TEXT = {"text": "ok", "keep": True}


def output(response: Any, text: Any) -> list[Any]:
    return [{"type": "function_call_output", "call_id": response.output[-1].call_id, "output": text}]


async def verdicts(served: Served, response: Any) -> list[str]:
    trace = (await served.http.get(f"/v1/responses/{response.id}/trace")).json()
    return [arrival["verdict"] for call in trace["calls"] for arrival in call["arrivals"]]


def tool_texts(served: Served) -> list[str]:
    return [one["content"] for one in served.model.requests[-1]["messages"] if one["role"] == "tool"]


async def test_an_output_is_accepted_once_and_is_on_record(serve: Serve) -> None:
    served = await serve([lookup(), TEXT])
    first = await served.client.responses.create(model="fake", input="Weather?", tools=[LOOKUP])
    assert await verdicts(served, first) == []
    second = await served.client.responses.create(
        model="fake", input=output(first, "sun"), previous_response_id=first.id, tools=[LOOKUP]
    )
    assert second.output_text == "ok"
    assert await verdicts(served, first) == ["accepted"]


async def test_the_same_output_again_is_a_duplicate_and_is_said_to_the_model_once(serve: Serve) -> None:
    served = await serve([lookup(), {"status": 500}, TEXT])
    create = served.client.responses.create
    first = await create(model="fake", input="Weather?", tools=[LOOKUP])
    failed = await create(model="fake", input=output(first, "sun"), previous_response_id=first.id)
    assert failed.status == "failed"
    second = await create(model="fake", input=output(first, "sun"), previous_response_id=first.id)
    assert (second.output_text, tool_texts(served)) == ("ok", ["sun"])
    again: Any = [*output(first, "sun"), {"role": "user", "content": "And now?"}]
    await create(model="fake", input=again, previous_response_id=second.id)
    assert tool_texts(served) == ["sun"]
    assert await verdicts(served, first) == ["accepted", "duplicate", "duplicate"]


async def test_another_output_is_refused_and_neither_is_used_any_more(serve: Serve) -> None:
    served = await serve([lookup(), TEXT])
    create = served.client.responses.create
    first = await create(model="fake", input="Weather?", tools=[LOOKUP])
    second = await create(model="fake", input=output(first, "sun"), previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="fake", input=output(first, "rain"), previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("input", "tool_output_conflict")
    assert await verdicts(served, first) == ["accepted", "conflict"]
    await create(model="fake", input="And now?", previous_response_id=second.id)
    [text] = tool_texts(served)
    assert "neither is used" in text


async def test_a_client_cannot_answer_for_a_tool_of_the_host(serve: Serve) -> None:
    served = await serve([run("print(7)"), TEXT])
    create = served.client.responses.create
    first = await create(model="fake", input="Go", tools=[PYTHON])
    forged: Any = {
        "type": "function_call_output",
        "call_id": first.output[0].id.replace("ci_", "call_"),
        "output": "8",
    }
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="fake", input=[forged], previous_response_id=first.id)
    assert caught.value.code == "tool_output_mismatch"
    await create(model="fake", input="And now?", previous_response_id=first.id)
    assert tool_texts(served) == ["7\n"]


async def test_in_a_conversation_and_with_parts_it_is_the_same(serve: Serve) -> None:
    served = await serve([lookup(), TEXT])
    conversation = await served.client.conversations.create()
    first = await served.client.responses.create(
        model="fake", input="Weather?", tools=[LOOKUP], conversation=conversation.id
    )
    parts = [{"type": "input_text", "text": "sun"}]
    await served.client.responses.create(model="fake", input=output(first, parts), conversation=conversation.id)
    assert tool_texts(served) == ["sun"]
    assert await verdicts(served, first) == ["accepted"]
