"""Consent: nothing runs before it, the stored call runs once after it, and a foreign or used id opens nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.toolhost.loop.checks import check_stream
from tests.toolhost.loop.conftest import MakeLoop
from tests.toolhost.loop.mcp_double import Double
from toolhost.loop.driver import LoopDriver
from toolhost.loop.errors import ApprovalError, RequestError
from toolhost.loop.request import LoopRequest, LoopResult, resolve_tools

CONTAINER = {"type": "mcp", "server_label": "container", "require_approval": "always"}
CALL = {"name": "container_exec", "arguments": {"cmd": ["rm", "x"]}}


async def ask(driver: LoopDriver, **fields: Any) -> LoopResult:
    run = await driver.start(LoopRequest("fake", **{"tools": [CONTAINER], "input": "Remove x", **fields}))
    check_stream([event async for event in run.events()])
    return await run.result()


def answer(result: LoopResult, approve: bool = True, **fields: Any) -> dict[str, Any]:
    [pending] = result.pending
    return {"type": "mcp_approval_response", "approval_request_id": pending.id, "approve": approve, **fields}


async def test_nothing_runs_before_approval_and_the_stored_call_runs_once_after_it(
    make_loop: MakeLoop, double: Double
) -> None:
    driver, model = await make_loop([{"calls": [CALL]}, {"text": "removed"}])
    first = await ask(driver)
    assert [item.type for item in first.response.output] == ["mcp_list_tools", "mcp_approval_request"]
    assert first.why == "approval"
    assert not double.host.runs
    second = await ask(driver, history=first.transcript, input=[answer(first)])
    assert double.host.runs == [("container", "exec", {"cmd": ["rm", "x"]})]
    call = next(item for item in second.response.output if item.type == "mcp_call")
    assert call.approval_request_id == first.pending[0].id
    assert second.response.output_text == "removed"
    assert [message["role"] for message in model.requests[1]["messages"]] == ["user", "assistant", "tool"]


async def test_a_client_that_replays_its_items_gets_the_same_and_cannot_change_the_arguments(
    make_loop: MakeLoop, double: Double
) -> None:
    driver, model = await make_loop([{"calls": [CALL]}, {"text": "removed"}])
    first = await ask(driver)
    replayed = [item.model_dump(exclude_none=True) for item in first.response.output]
    replayed[-1]["arguments"] = '{"cmd": ["rm", "everything"]}'
    history = [{"role": "user", "content": "Remove x"}, *replayed]
    second = await ask(driver, input=[*history, answer(first)])
    assert double.host.runs == [("container", "exec", {"cmd": ["rm", "x"]})]
    assert [item.type for item in second.response.output] == ["mcp_call", "message"]
    assert model.requests[1]["messages"][2]["content"] == '{"exec": {"cmd": ["rm", "x"]}}'


async def test_a_refused_call_never_runs_and_the_model_is_told(make_loop: MakeLoop, double: Double) -> None:
    driver, model = await make_loop([{"calls": [CALL]}, {"text": "kept"}])
    first = await ask(driver)
    second = await ask(driver, history=first.transcript, input=[answer(first, False, reason="I need x.")])
    assert not double.host.runs
    assert "declined" in model.requests[1]["messages"][-1]["content"]
    assert "I need x." in model.requests[1]["messages"][-1]["content"]
    assert second.response.output_text == "kept"


@pytest.mark.parametrize("approve", [True, False])
async def test_a_used_id_is_refused(approve: bool, make_loop: MakeLoop, double: Double) -> None:
    driver, _ = await make_loop([{"calls": [CALL]}, {"text": "done"}])
    first = await ask(driver)
    await ask(driver, history=first.transcript, input=[answer(first, approve)])
    runs = len(double.host.runs)
    with pytest.raises(ApprovalError, match="not open"):
        await ask(driver, history=first.transcript, input=[answer(first)])
    assert len(double.host.runs) == runs


async def test_another_principals_id_is_refused_and_stays_open(make_loop: MakeLoop, double: Double) -> None:
    driver, _ = await make_loop([{"calls": [CALL]}, {"text": "done"}])
    first = await ask(driver, principal="ann")
    with pytest.raises(ApprovalError, match="not open"):
        await ask(driver, principal="bob", history=first.transcript, input=[answer(first)])
    assert not double.host.runs
    await ask(driver, principal="ann", history=first.transcript, input=[answer(first)])
    assert len(double.host.runs) == 1


async def test_an_approved_tool_that_is_no_longer_allowed_does_not_run(make_loop: MakeLoop, double: Double) -> None:
    driver, _ = await make_loop([{"calls": [CALL]}, {"text": "done"}])
    first = await ask(driver)
    narrowed = [{**CONTAINER, "allowed_tools": ["other"]}]
    with pytest.raises(RequestError, match="not offered"):
        await ask(driver, tools=narrowed, history=first.transcript, input=[answer(first)])
    assert not double.host.runs


async def test_a_talk_that_goes_on_without_an_answer_leaves_the_call_unexecuted(
    make_loop: MakeLoop, double: Double
) -> None:
    driver, model = await make_loop([{"calls": [CALL]}, {"text": "all right"}])
    first = await ask(driver)
    await ask(driver, history=first.transcript, input="Never mind.")
    assert not double.host.runs
    assert model.requests[1]["messages"][2]["content"] == "No result was provided for this call."


async def test_an_old_answer_in_replayed_history_executes_nothing(make_loop: MakeLoop, double: Double) -> None:
    driver, _ = await make_loop([{"calls": [CALL]}, {"text": "removed"}, {"text": "bye"}])
    first = await ask(driver)
    second = await ask(driver, history=first.transcript, input=[answer(first)])
    items = [
        *(item.model_dump(exclude_none=True) for item in first.response.output),
        answer(first),
        *(item.model_dump(exclude_none=True) for item in second.response.output),
        {"role": "user", "content": "Thanks"},
    ]
    third = await ask(driver, input=items)
    assert third.response.output_text == "bye"
    assert len(double.host.runs) == 1


async def test_only_the_named_tools_wait_and_the_others_of_the_round_run_first(
    make_loop: MakeLoop, double: Double
) -> None:
    files = {
        "type": "mcp",
        "server_label": "files",
        "require_approval": {"always": {"tool_names": ["write"]}},
    }
    calls = [{"name": "files_write", "arguments": {"n": 1}}, {"name": "files_read", "arguments": {"n": 2}}]
    driver, _ = await make_loop([{"calls": calls}])
    first = await ask(driver, tools=[files])
    assert double.host.runs == [("files", "read", {"n": 2})]
    assert [one.name for one in first.pending] == ["write"]


async def test_what_is_named_under_never_runs_and_every_other_tool_waits(make_loop: MakeLoop, double: Double) -> None:
    files = {"type": "mcp", "server_label": "files", "require_approval": {"never": {"tool_names": ["read"]}}}
    calls = [{"name": "files_write", "arguments": {"n": 1}}, {"name": "files_read", "arguments": {"n": 2}}]
    driver, _ = await make_loop([{"calls": calls}])
    first = await ask(driver, tools=[files])
    assert double.host.runs == [("files", "read", {"n": 2})]
    assert [one.name for one in first.pending] == ["write"]


async def test_what_is_named_under_both_waits(make_loop: MakeLoop, double: Double) -> None:
    both = {"never": {"tool_names": ["write", "read"]}, "always": {"tool_names": ["write"]}}
    driver, _ = await make_loop([{"calls": [{"name": "files_write", "arguments": {"n": 1}}]}])
    first = await ask(driver, tools=[{"type": "mcp", "server_label": "files", "require_approval": both}])
    assert not double.host.runs
    assert [one.name for one in first.pending] == ["write"]


@pytest.mark.parametrize(
    "tools",
    [
        [{**CONTAINER, "server_label": "python"}, {"type": "code_interpreter"}],
        [{"type": "web_search", "filters": {"allowed_domains": ["example.org"]}}, {"type": "web_search_preview"}],
        [CONTAINER, {**CONTAINER, "require_approval": "never"}],
    ],
)
def test_a_limit_is_not_lost_to_a_second_mention(tools: list[Any]) -> None:
    with pytest.raises(RequestError, match="named twice"):
        resolve_tools(tools)
    [found], _ = resolve_tools([tools[0], tools[0]])
    [plain_first], _ = resolve_tools([tools[1], tools[0]])
    assert plain_first == found


async def test_a_filter_for_tools_that_only_read_is_hard_too(make_loop: MakeLoop, double: Double) -> None:
    files = {"type": "mcp", "server_label": "files", "allowed_tools": {"read_only": True}}
    driver, model = await make_loop([{"calls": [{"name": "files_write", "arguments": {}}]}, {"text": "no"}])
    await ask(driver, tools=[files])
    assert not double.host.runs
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["files_read"]


async def test_allowed_tools_is_a_hard_filter(make_loop: MakeLoop, double: Double) -> None:
    files = {"type": "mcp", "server_label": "files", "require_approval": "never", "allowed_tools": ["read"]}
    driver, model = await make_loop([{"calls": [{"name": "files_write", "arguments": {}}]}, {"text": "no"}])
    await ask(driver, tools=[files])
    assert not double.host.runs
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["files_read"]
