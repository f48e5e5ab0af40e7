"""Conversations: their items, their turns, and that no turn is lost when two are taken at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.conversations import Conversation, ConversationItemList

from tests.toolhost.gateway.conftest import Serve
from tests.toolhost.gateway.test_responses import PYTHON, READ, SET
from tests.toolhost.loop.checks import assert_no_extras, check_response
from toolhost.auth import Scope, mint
from toolhost.gateway.errors import ApiError
from toolhost.gateway.talks import Talks


async def test_a_conversation_keeps_its_turns_and_its_session(serve: Serve) -> None:
    served = await serve([SET, {"text": "set"}, READ, {"text": "It is 42"}])
    talk = await served.client.conversations.create(
        metadata={"topic": "x"}, items=[{"type": "message", "role": "user", "content": "Be brief"}]
    )
    assert_no_extras(Conversation.model_validate(talk.model_dump(), strict=True))
    first = await served.client.responses.create(model="fake", input="Set x", tools=[PYTHON], conversation=talk.id)
    second = await served.client.responses.create(
        model="fake",
        input="Read x",
        tools=[PYTHON],
        conversation={"id": talk.id},
        include=["code_interpreter_call.outputs"],
    )
    check_response(second)
    assert second.conversation is not None
    assert second.conversation.id == talk.id
    assert second.output[0].outputs[0].logs == "42\n"  # type: ignore[union-attr,index]
    assert first.output[0].container_id == second.output[0].container_id  # type: ignore[union-attr]
    texts = [message["content"] for message in served.model.requests[-1]["messages"] if message["role"] == "user"]
    assert texts == ["Be brief", "Set x", "Read x"]
    raw = await served.http.get(f"/v1/conversations/{talk.id}/items", params={"order": "asc", "limit": 100})
    listed = ConversationItemList.model_validate_json(raw.content, strict=True)
    assert_no_extras(listed)
    assert [item.type for item in listed.data] == [
        "message",
        *("message", "code_interpreter_call", "message"),
        *("message", "code_interpreter_call", "message"),
    ]


async def test_items_are_added_read_and_taken_out(serve: Serve) -> None:
    served = await serve([{"text": "ok"}])
    talk = await served.client.conversations.create()
    added = await served.client.conversations.items.create(
        talk.id, items=[{"role": "user", "content": "secret"}, {"role": "user", "content": "open"}]
    )
    secret, kept = added.data
    assert (await served.client.conversations.items.retrieve(kept.id, conversation_id=talk.id)).id == kept.id  # type: ignore[arg-type]
    await served.client.conversations.items.delete(secret.id, conversation_id=talk.id)  # type: ignore[arg-type]
    assert [item.id async for item in served.client.conversations.items.list(talk.id)] == [kept.id]
    await served.client.responses.create(model="fake", input="Go", conversation=talk.id)
    texts = [message["content"] for message in served.model.requests[-1]["messages"]]
    assert texts == ["open", "Go"]
    with pytest.raises(openai.NotFoundError):
        await served.client.conversations.items.retrieve(secret.id, conversation_id=talk.id)  # type: ignore[arg-type]


async def test_an_item_of_a_turn_that_was_taken_out_is_not_sent_again(serve: Serve) -> None:
    served = await serve([{"text": "a secret"}, {"text": "ok"}])
    talk = await served.client.conversations.create()
    first = await served.client.responses.create(model="fake", input="Tell", conversation=talk.id)
    await served.client.conversations.items.delete(first.output[0].id, conversation_id=talk.id)  # type: ignore[arg-type]
    await served.client.responses.create(model="fake", input="Go", conversation=talk.id)
    assert [message["content"] for message in served.model.requests[-1]["messages"]] == ["Tell", "Go"]


async def test_metadata_is_changed_and_a_deleted_conversation_is_gone(serve: Serve) -> None:
    served = await serve([])
    talk = await served.client.conversations.create(metadata={"a": "1"})
    changed = await served.client.conversations.update(talk.id, metadata={"b": "2"})
    assert changed.metadata == {"b": "2"}
    assert (await served.client.conversations.retrieve(talk.id)).metadata == {"b": "2"}
    assert (await served.client.conversations.delete(talk.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await served.client.conversations.retrieve(talk.id)
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.create(model="fake", input="Hi", conversation=talk.id)


async def test_two_turns_at_the_same_time_are_both_kept(serve: Serve) -> None:
    rounds = [{"text": f"answer {n}", "pause": "gate", "when": f"turn {n}$"} for n in range(6)]
    served = await serve([*rounds, {"text": "end"}])
    talk = await served.client.conversations.create()
    turns = [
        asyncio.create_task(served.client.responses.create(model="fake", input=f"turn {n}", conversation=talk.id))
        for n in range(6)
    ]
    while len(served.model.requests) < 6:  # noqa: ASYNC110 - the model counts, it has no event for a number
        await asyncio.sleep(0.01)
    served.model.release("gate")
    await asyncio.gather(*turns)
    items: list[Any] = [item async for item in served.client.conversations.items.list(talk.id, order="asc")]
    texts = [item.content[0].text for item in items]
    assert sorted(texts) == sorted([f"turn {n}" for n in range(6)] + [f"answer {n}" for n in range(6)])
    for n in range(6):
        assert texts.index(f"answer {n}") == texts.index(f"turn {n}") + 1
    unit = await served.gateway.conversations.find(talk.id)
    assert unit is not None
    assert unit.turn_count == 6
    assert unit.usage["total_tokens"] == 6 * 15
    assert unit.topic.startswith("turn ")


async def test_everything_of_another_principal_is_not_found(serve: Serve, tmp_path: Path) -> None:
    ann, ann_line = mint("ann", [Scope.USE])
    bob, bob_line = mint("bob", [Scope.USE])
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ann_line}\n{bob_line}\n")
    call = {"calls": [{"name": "python", "arguments": {"code": "x = 1"}}]}
    served = await serve([call, {"text": "ok"}], tokens=tokens)
    hers, his = served.as_user(ann), served.as_user(bob)
    with pytest.raises(openai.AuthenticationError):
        await served.client.responses.create(model="fake", input="Hi")
    response = await hers.responses.create(model="fake", input="Hi", tools=[PYTHON])
    talk = await hers.conversations.create(items=[{"role": "user", "content": "a"}])
    item = (await hers.conversations.items.list(talk.id)).data[0]
    missing: list[Any] = [
        his.responses.retrieve(response.id),
        his.responses.cancel(response.id),
        his.responses.delete(response.id),
        his.responses.input_items.list(response.id),
        his.responses.create(model="fake", input="Hi", conversation=talk.id),
        his.conversations.retrieve(talk.id),
        his.conversations.update(talk.id, metadata={}),
        his.conversations.delete(talk.id),
        his.conversations.items.list(talk.id),
        his.conversations.items.create(talk.id, items=[{"role": "user", "content": "b"}]),
        his.conversations.items.retrieve(item.id, conversation_id=talk.id),  # type: ignore[arg-type]
    ]
    for work in missing:
        with pytest.raises(openai.NotFoundError):
            await work
    container: Any = response.output[0].container_id  # type: ignore[union-attr]
    for body in (
        {"previous_response_id": response.id},
        {"input": [{"type": "item_reference", "id": response.output[0].id}]},
        {"tools": [{"type": "code_interpreter", "container": container}]},
    ):
        with pytest.raises(openai.BadRequestError, match="not found"):
            await his.responses.create(**{"model": "fake", "input": "Hi", **body})  # type: ignore[call-overload]
    assert (await hers.responses.retrieve(response.id)).status == "completed"


async def test_an_id_of_another_principal_is_answered_as_one_that_never_was(serve: Serve, tmp_path: Path) -> None:
    ann, ann_line = mint("ann", [Scope.USE])
    bob, bob_line = mint("bob", [Scope.USE])
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ann_line}\n{bob_line}\n")
    call = {"calls": [{"name": "python", "arguments": {"code": "x = 1"}}]}
    served = await serve([call, {"text": "ok"}], tokens=tokens)
    hers = served.as_user(ann)
    response: Any = await hers.responses.create(model="fake", input="Hi", tools=[PYTHON])
    talk = await hers.conversations.create()
    paths = [
        ("GET", "/v1/responses/{}", response.id),
        ("GET", "/v1/responses/{}?stream=true", response.id),
        ("GET", "/v1/responses/{}/trace", response.id),
        ("GET", "/v1/responses/{}/input_items", response.id),
        ("POST", "/v1/responses/{}/cancel", response.id),
        ("DELETE", "/v1/responses/{}", response.id),
        ("GET", "/v1/conversations/{}", talk.id),
        ("GET", "/v1/conversations/{}/items", talk.id),
        ("GET", "/v1/containers/{}/files", response.output[0].container_id),
        ("GET", "/v1/containers/{}/files/cfile_YQ/content", response.output[0].container_id),
    ]
    for method, path, ident in paths:
        never = ident[:-4] + "0000"
        answers = [
            await served.http.request(method, path.format(one), headers={"Authorization": f"Bearer {bob}"})
            for one in (ident, never)
        ]
        assert [answer.status_code for answer in answers] == [404, 404], path
        assert answers[0].text.replace(ident, "ID") == answers[1].text.replace(never, "ID")


def replayed(*items: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in items]


async def test_items_that_a_client_replays_are_there_once(serve: Serve) -> None:
    served = await serve(
        [SET, {"reasoning": "hm", "text": "set"}, {"text": "yes"}, SET, {"text": "set"}, {"text": "yes"}]
    )
    create = served.client.responses.create
    talk = await served.client.conversations.create()
    for place in ({"conversation": talk.id}, {}):
        first = await create(model="fake", input="Set x", tools=[PYTHON], **place)
        asked = (await served.client.responses.input_items.list(first.id)).data
        items = [*replayed(*asked, *first.output), {"role": "user", "content": "Is it?"}]
        after = place or {"previous_response_id": first.id}
        second = await create(model="fake", input=items, tools=[PYTHON], **after)
        roles = [message["role"] for message in served.model.requests[-1]["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
        assert [item.content[0].text for item in (await served.client.responses.input_items.list(second.id)).data] == [  # type: ignore[union-attr]
            "Is it?"
        ]
    listed = [item.id async for item in served.client.conversations.items.list(talk.id, limit=2)]
    assert len(listed) == len(set(listed)) == 6


async def test_a_client_that_gives_every_message_the_same_id_loses_none(serve: Serve) -> None:
    served = await serve([{"text": "a"}, {"text": "b"}])
    talk = await served.client.conversations.create()
    for text in ("one", "two"):
        message: Any = {"role": "user", "content": text, "id": "msg_1"}
        await served.client.responses.create(model="fake", input=[message], conversation=talk.id)
    assert [message["content"] for message in served.model.requests[-1]["messages"]] == ["one", "a", "two"]
    listed = [item.id async for item in served.client.conversations.items.list(talk.id, limit=1)]
    assert len(listed) == len(set(listed)) == 4


async def test_a_client_that_gives_every_item_the_same_id_loses_none(serve: Serve) -> None:
    served = await serve([{"text": "ok"}])
    items: list[Any] = [{"role": "user", "content": "Both?", "id": "fake"}]
    items += [{"type": "function_call", "id": "fake", "call_id": one, "name": "f", "arguments": "{}"} for one in "ab"]
    items += [{"type": "function_call_output", "id": "fake", "call_id": one, "output": one} for one in "ab"]
    await served.client.responses.create(model="fake", input=items)
    roles = [message["role"] for message in served.model.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"]


async def test_an_id_is_added_to_a_conversation_once(serve: Serve) -> None:
    served = await serve([])
    message: Any = {"role": "user", "content": "x", "id": "msg_1"}
    conversations = served.client.conversations
    with pytest.raises(openai.BadRequestError, match=r"items\[1\]: the conversation has, or had, an item with id"):
        await conversations.create(items=[message, message])
    talk = await conversations.create(items=[message])
    await conversations.items.delete("msg_1", conversation_id=talk.id)
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]: the conversation has, or had"):
        await conversations.items.create(talk.id, items=[message])


async def test_an_id_is_added_once_also_by_two_at_the_same_time(serve: Serve) -> None:
    served = await serve([])
    talks = Talks(served.gateway.conversations, served.gateway.store)
    talk = await talks.create("anonymous", [], {})
    tries = [talks.add(talk.id, "anonymous", [{"role": "user", "content": "x", "id": "msg_1"}]) for _ in range(8)]
    refused = [one for one in await asyncio.gather(*tries, return_exceptions=True) if isinstance(one, BaseException)]
    assert [type(one) for one in refused] == [ApiError] * 7
    assert [item["id"] for item in await talks.items(talk.id, "anonymous")] == ["msg_1"]


CALL: Any = {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "a", "output": "1"}
CONSENT: Any = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}


@pytest.mark.parametrize("item", [OUTPUT, CONSENT])
async def test_what_answers_nothing_is_not_added(serve: Serve, item: Any) -> None:
    served = await serve([{"text": "ok"}])
    conversations = served.client.conversations
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]: the conversation has no"):
        await conversations.create(items=[item])
    talk = await conversations.create()
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]: the conversation has no"):
        await conversations.items.create(talk.id, items=[item])
    await served.client.responses.create(model="fake", input="Hi", conversation=talk.id)


async def test_a_call_that_is_taken_out_takes_its_output_from_the_model(serve: Serve) -> None:
    served = await serve([{"text": "ok"}] * 2)
    talk = await served.client.conversations.create(items=[CALL])
    await served.client.conversations.items.create(talk.id, items=[OUTPUT])
    for roles in (["assistant", "tool", "user"], ["user", "assistant", "user"]):
        await served.client.responses.create(model="fake", input="Hi", conversation=talk.id)
        assert [message["role"] for message in served.model.requests[-1]["messages"]] == roles
        if roles[0] == "assistant":
            await served.client.conversations.items.delete("fc_1", conversation_id=talk.id)


async def test_a_deleted_conversation_takes_no_items_of_others_with_it(serve: Serve) -> None:
    served = await serve([{"text": "kept"}, {"text": "found"}])
    elsewhere = await served.client.responses.create(model="fake", input="Hi")
    talk = await served.client.conversations.create(items=replayed(*elsewhere.output))  # type: ignore[arg-type]
    await served.client.conversations.delete(talk.id)
    reference: Any = {"type": "item_reference", "id": elsewhere.output[0].id}
    go: Any = {"role": "user", "content": "Go"}
    after = await served.client.responses.create(model="fake", input=[reference, go])
    assert after.output_text == "found"
