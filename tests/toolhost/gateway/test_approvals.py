"""Consent through the gateway: it waits through a restart, runs the stored call once, and only for its principal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.toolhost.gateway.conftest import Serve, gateway_over
from tests.toolhost.loop.checks import check_response
from tests.toolhost.loop.mcp_double import Double
from toolhost.auth import Scope, mint
from toolhost.loop.tool_client import McpToolServer

CONTAINER: Any = {"type": "mcp", "server_label": "container", "require_approval": "always"}
CALL = {"calls": [{"name": "container_exec", "arguments": {"cmd": ["rm", "x"]}}]}


def consent(response: Any, approve: bool = True) -> dict[str, Any]:
    request = next(item for item in response.output if item.type == "mcp_approval_request")
    return {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve}


async def test_an_approval_waits_through_a_restart_and_runs_the_stored_call_once(
    tool_server: McpToolServer, double: Double, tmp_path: Path
) -> None:
    async with gateway_over(tool_server, tmp_path, [CALL]) as served:
        first = await served.client.responses.create(model="fake", input="Remove x", tools=[CONTAINER])
        check_response(first)
        assert [item.type for item in first.output] == ["mcp_list_tools", "mcp_approval_request"]
    assert not double.host.runs
    async with gateway_over(tool_server, tmp_path, [{"text": "removed"}, {"text": "again"}]) as served:
        answer: Any = [consent(first)]
        second = await served.client.responses.create(
            model="fake", input=answer, tools=[CONTAINER], previous_response_id=first.id
        )
        check_response(second)
        assert [item.type for item in second.output] == ["mcp_call", "message"]
        assert double.host.runs == [("container", "exec", {"cmd": ["rm", "x"]})]
        with pytest.raises(openai.BadRequestError, match="not open"):
            await served.client.responses.create(
                model="fake", input=answer, tools=[CONTAINER], previous_response_id=first.id
            )
        assert len(double.host.runs) == 1
        third = await served.client.responses.create(model="fake", input="More", previous_response_id=second.id)
        assert third.output_text == "again"
        assert [message["role"] for message in served.model.requests[-1]["messages"]] == [
            *("user", "assistant", "tool", "assistant", "user")
        ]


async def test_an_approval_of_another_principal_is_not_open(serve: Serve, double: Double, tmp_path: Path) -> None:
    ann, ann_line = mint("ann", [Scope.USE])
    bob, bob_line = mint("bob", [Scope.USE])
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ann_line}\n{bob_line}\n")
    served = await serve([CALL, {"text": "removed"}], tokens=tokens)
    first = await served.as_user(ann).responses.create(model="fake", input="Remove x", tools=[CONTAINER])
    replayed: Any = [
        {"role": "user", "content": "Remove x"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        consent(first),
    ]
    with pytest.raises(openai.BadRequestError, match="not open"):
        await served.as_user(bob).responses.create(model="fake", input=replayed, tools=[CONTAINER])
    assert not double.host.runs
    await served.as_user(ann).responses.create(model="fake", input=replayed, tools=[CONTAINER])
    assert len(double.host.runs) == 1


async def test_a_declined_call_never_runs(serve: Serve, double: Double) -> None:
    served = await serve([CALL, {"text": "kept"}])
    first = await served.client.responses.create(model="fake", input="Remove x", tools=[CONTAINER])
    answer: Any = [consent(first, approve=False)]
    second = await served.client.responses.create(
        model="fake", input=answer, tools=[CONTAINER], previous_response_id=first.id
    )
    assert second.output_text == "kept"
    assert not double.host.runs


async def test_allowed_tools_is_a_hard_filter(serve: Serve, double: Double) -> None:
    files: Any = {"type": "mcp", "server_label": "files", "allowed_tools": ["read"]}
    served = await serve([{"calls": [{"name": "files_write", "arguments": {}}]}, {"text": "no"}])
    response = await served.client.responses.create(model="fake", input="Write", tools=[files])
    assert not double.host.runs
    assert response.output_text == "no"
    assert [tool["function"]["name"] for tool in served.model.requests[0]["tools"]] == ["files_read"]
