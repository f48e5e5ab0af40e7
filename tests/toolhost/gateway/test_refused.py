"""What the model server refuses before anything has happened is an error of the request, as it is with OpenAI; once
something has happened, and where the fault is not the client's, it is a response that failed."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.toolhost.gateway.conftest import Serve
from tests.toolhost.gateway.test_cases import PYTHON, run, stream

GONE: Any = {"status": 404, "text": "The model `wrong` does not exist."}
TABLE: list[tuple[dict[str, Any], int, str, str | None]] = [
    (GONE, 404, "model_not_found", "model"),  # vLLM, OpenAI
    ({"status": 400, "text": "does not exist", "code": "model_not_found"}, 404, "model_not_found", "model"),
    ({"status": 400, "text": "too many tokens"}, 400, "invalid_prompt", None),
    ({"status": 422, "text": "top_p"}, 400, "invalid_prompt", None),
    ({"status": 429, "text": "slow down"}, 429, "rate_limit_exceeded", None),
]
NOT_THE_CLIENTS = [
    {"status": 404, "text": "Invalid URL (POST /v1/chat/completions)"},
    {"status": 401, "text": "wrong key"},
    {"status": 500},
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("answer", "status", "code", "param"), TABLE)
async def test_a_refusal_is_an_error_of_the_request(
    serve: Serve, streamed: bool, answer: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    served = await serve([answer, {"text": "fine"}])
    with pytest.raises(openai.APIStatusError) as caught:
        await served.client.responses.create(model="wrong", input="Hi", stream=streamed)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, code, param)
    assert str(answer["text"]) in caught.value.message
    assert (await served.client.responses.create(model="fake", input="Hi")).output_text == "fine"


async def test_a_conversation_goes_on_after_a_refusal(serve: Serve) -> None:
    served = await serve([{"text": "a"}, GONE, {"text": "b"}])
    talk = await served.client.conversations.create()
    await served.client.responses.create(model="fake", input="1", conversation=talk.id)
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.create(model="wrong", input="2", conversation=talk.id)
    await served.client.responses.create(model="fake", input="3", conversation=talk.id)
    assert [one["content"] for one in served.model.requests[-1]["messages"]] == ["1", "a", "3"]


@pytest.mark.parametrize("store", [False, True])
async def test_nothing_else_is_told_of_a_tools_list_before(serve: Serve, store: bool) -> None:
    served = await serve([GONE])
    tools: Any = [{"type": "mcp", "server_label": "python"}]
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.create(model="wrong", input="Hi", tools=tools, store=store)


@pytest.mark.parametrize("answer", NOT_THE_CLIENTS)
async def test_what_is_not_the_clients_fault_is_a_response_that_failed(serve: Serve, answer: dict[str, Any]) -> None:
    served = await serve([answer, answer])
    response = await served.client.responses.create(model="fake", input="Hi")
    assert (response.status, response.error and response.error.code) == ("failed", "server_error")
    assert (await stream(served, input="Hi"))[-1].type == "response.failed"


async def test_a_refusal_after_a_tool_has_run_is_a_response_that_failed(serve: Serve) -> None:
    served = await serve([run("1"), GONE, run("1"), GONE])
    response = await served.client.responses.create(model="fake", input="Hi", tools=[PYTHON])
    assert (response.status, response.output[0].type) == ("failed", "code_interpreter_call")
    assert (await stream(served, input="Hi", tools=[PYTHON]))[-1].type == "response.failed"


async def test_a_background_response_is_there_already_and_fails(serve: Serve) -> None:
    served = await serve([GONE])
    response = await served.client.responses.create(model="wrong", input="Hi", background=True)
    async with asyncio.timeout(20):
        while response.status in ("queued", "in_progress"):
            response = await served.client.responses.retrieve(response.id)
    assert response.status == "failed"


async def test_a_stream_begins_also_while_the_model_is_silent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolhost.gateway.routes.HELD_S", 0.05)
    served = await serve([{"text": "late", "pause": "gate"}])
    events = await served.client.responses.create(model="fake", input="Hi", stream=True)
    async with asyncio.timeout(20):
        assert (await anext(aiter(events))).type == "response.created"
    served.model.release("gate")
    assert [event async for event in events][-1].type == "response.completed"


async def test_who_leaves_before_the_model_has_answered_ends_the_run(serve: Serve) -> None:
    served = await serve([{"text": "late", "pause": "gate"}])
    asking = asyncio.create_task(stream(served, input="Hi"))
    await served.model.reached("gate")
    asking.cancel()
    async with asyncio.timeout(20):
        await served.model.left()
