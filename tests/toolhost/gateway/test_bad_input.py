"""What clients send wrong gets a 400 that names the parameter, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.toolhost.gateway.conftest import Serve, Served
from toolhost.config import GatewaySettings
from toolhost.errors import ConfigurationError
from toolhost.gateway.assembly import assemble
from toolhost.gateway.errors import ApiError
from toolhost.gateway.items import checked, for_model
from toolhost.gateway.schema import CreateResponse, parse
from toolhost.loop.driver import NoTools
from toolhost.loop.errors import RequestError
from toolhost.loop.ids import RandomIds
from toolhost.loop.transcript import as_items, model_view, paired, turns

CASES: list[tuple[dict[str, Any], str]] = [
    ({"input": 5}, "input"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
    ({"input": [{"content": "x"}]}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "call_x", "output": "y"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": 5, "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_nothing"}]}, "input"),
    ({"input": [{"type": "mcp_approval_response", "approval_request_id": "mcpr_x", "approve": True}]}, "input"),
    ({"input": [{"type": "mcp_approval_response", "approval_request_id": "mcpr_x", "approve": "yes"}]}, "input"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": None}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [{"role": "user", "content": "x"}] * 5001}, "input"),
    ({"input": "x" * 10_000_001}, "input"),
    ({"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
    ({"prompt": {"id": "pmpt_x"}}, "prompt"),
    ({"model": 5}, "model"),
    ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
    ({"previous_response_id": "../../etc/passwd"}, "previous_response_id"),
    ({"previous_response_id": "resp_x", "conversation": "conv_x"}, "conversation"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "name": "two words"}]}, "tools"),
    ({"tools": [{"type": "function", "name": "twice"}, {"type": "function", "name": "twice"}]}, "tools"),
    ({"tools": [{"type": "image_generation"}]}, "tools"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools"),
    ({"tools": [{"type": "mcp"}]}, "tools"),
    ({"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1/mcp"}]}, "tools"),
    ({"tools": [{"type": "mcp", "server_label": "python", "headers": {"X-Toolhost-Session": "hers"}}]}, "tools"),
    ({"tools": [{"type": "mcp", "server_label": "python", "headers": {"x-session-id": "hers"}}]}, "tools"),
    ({"tools": [{"type": "mcp", "server_label": "python", "allowed_tools": 5}]}, "tools"),
    ({"tools": [{"type": "mcp", "server_label": "python", "require_approval": "sometimes"}]}, "tools"),
    ({"tools": [{"type": "mcp", "server_label": "python", "allowed_tools": {"read_only": "yes"}}]}, "tools"),
    ({"tools": [{"type": "mcp", "server_label": "python", "allowed_tools": {"names": ["x"]}}]}, "tools"),
    (
        {
            "tools": [
                {
                    "type": "mcp",
                    "server_label": "x",
                    "require_approval": {"always": {"tool_names": [], "read_only": False}},
                }
            ]
        },
        "tools",
    ),
    ({"tools": [{"type": "mcp", "server_label": "browser", "headers": {"x-toolhost-ttl": "1"}}]}, "tools"),
    ({"tools": [{"type": "web_search", "filters": 5}]}, "tools"),
    ({"tools": [{"type": "web_search", "filters": {"allowed_domains": "example.org"}}]}, "tools"),
    ({"tools": [{"type": "web_search", "filters": {"allowed_domains": ["a.example, b.example"]}}]}, "tools"),
    ({"tools": [{"type": "web_search", "filters": {"allowed_domains": ["a" * 254]}}]}, "tools"),
    ({"tools": [{"type": "web_search", "filters": {"allowed_domains": ["ü" * 64]}}]}, "tools"),
    ({"tools": [{"type": "web_search", "filters": {"blocked_domains": ["example.org"]}}]}, "tools"),
    ({"tools": [{"type": "web_search", "external_web_access": False}]}, "tools"),
    ({"tools": [{"type": "code_interpreter", "container": "cntr_hers"}]}, "tools"),
    ({"tools": [{"type": "code_interpreter", "container": 5}]}, "tools"),
    ({"tools": [5]}, "tools"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "nothing"}}, "tool_choice"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tool_calls": -1}, "max_tool_calls"),
    ({"temperature": 3}, "temperature"),
    ({"include": ["everything"]}, "include"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"text": {"format": {"type": "xml"}}}, "text"),
    ({"text": {"format": {"type": "json_schema"}}}, "text"),
    ({"reasoning": {"effort": "enormous"}}, "reasoning"),
    ({"stream": "perhaps"}, "stream"),
]


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve([])


async def test_each_wrong_body_is_a_400_that_names_its_parameter(served: Served) -> None:
    for body, param in CASES:
        answer = await served.http.post("/v1/responses", json={"model": "fake", "input": "Hi", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (body, answer.text)
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert not served.model.requests
    assert not served.gateway.runs._running
    await served.gateway.store.clear_due()
    assert await served.gateway.store.due() == []


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b'"x"', b'{"a": NaN}', b'{"a": 1e999}', b"\xff\xfe", b'{"input": "\\ud800"}', b"[" * 100_000]
)
async def test_a_body_that_is_no_json_object_is_a_400(served: Served, raw: bytes) -> None:
    answer = await served.http.post("/v1/responses", content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_what_is_wrong_with_an_input_is_said_of_what_it_is(served: Served) -> None:
    for value, text in (
        ([{"role": "user", "content": "x"}] * 5001, "5000 items, not 5001"),
        ("x" * 10_000_001, "10000000 characters"),
        ([{"role": "user", "content": "x"}, "y"], "item 1 is not an object"),
        (5, "a text or a list of items"),
    ):
        answer = await served.http.post("/v1/responses", json={"model": "fake", "input": value})
        assert text in answer.json()["error"]["message"]


async def test_a_kind_of_tool_choice_that_is_not_there_is_said_to_be_so(served: Served) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    body = {"model": "fake", "input": "Hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": choice}
    answer = await served.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert answer.json()["error"]["message"] == "tool_choice of type 'allowed_tools' is not supported"


async def test_a_body_beyond_the_cap_is_a_413(serve: Serve) -> None:
    served = await serve([], max_body_bytes=2000)
    answer = await served.http.post("/v1/responses", json={"model": "fake", "input": "x" * 3000})
    assert answer.status_code == 413


async def test_unknown_ids_and_paths_are_404_in_the_apis_form(served: Served) -> None:
    for method, path in (
        ("GET", "/v1/responses/resp_x"),
        ("GET", "/v1/responses/resp_x?stream=true"),
        ("GET", "/v1/responses/" + "x" * 5000),
        ("DELETE", "/v1/responses/resp_x"),
        ("POST", "/v1/responses/resp_x/cancel"),
        ("GET", "/v1/responses/resp_x/input_items"),
        ("GET", "/v1/conversations/conv_x"),
        ("POST", "/v1/conversations/conv_x"),
        ("GET", "/v1/conversations/unit_x/items"),
        ("GET", "/v1/nothing"),
    ):
        answer = await served.http.request(method, path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["message"]


async def test_wrong_queries_are_400(serve: Serve) -> None:
    served = await serve([{"text": "ok"}])
    response = await served.client.responses.create(model="fake", input="Hi")
    for query, param in (
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=-5", "starting_after"),
        ("starting_after=1", "starting_after"),
    ):
        answer = await served.http.get(f"/v1/responses/{response.id}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    for query, param in (("limit=0", "limit"), ("limit=1e3", "limit"), ("order=up", "order"), ("after=msg_x", "after")):
        answer = await served.http.get(f"/v1/responses/{response.id}/input_items?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    beyond = await served.http.get(f"/v1/responses/{response.id}?stream=true&starting_after=100000")
    assert beyond.text == "data: [DONE]\n\n"


TYPES = [
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "code_interpreter_call",
    "web_search_call",
]
NAMES = [
    "id",
    "role",
    "content",
    "call_id",
    "name",
    "arguments",
    "output",
    "outputs",
    "code",
    "status",
    "error",
    "server_label",
    "approval_request_id",
    "approve",
    "summary",
    "tools",
    "action",
    "text",
    "logs",
    "replay",
]
LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from(["", "user", "assistant", "call_1", "{}", "{", "x", "input_text", "unknown", "completed"])
)
VALUE = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from([*NAMES, "type"]),
            inner | st.sampled_from(["input_text", "output_text", "logs", "refusal"]),
            max_size=4,
        )
    ),
    max_leaves=8,
)
ITEM = st.builds(
    lambda kind, rest: {**rest, **({"type": kind} if kind else {})},
    st.sampled_from([*TYPES, None]),
    st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=7),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ITEM, max_size=4))
def test_items_of_any_shape_are_read_by_the_loop_or_refused(items: list[dict[str, Any]]) -> None:
    try:
        found = for_model(checked(items, RandomIds()), "ann", None)  # type: ignore[arg-type]
        turns(paired(model_view(as_items(found), {})))
    except (ApiError, RequestError):
        return
    json.dumps(found)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(list(CreateResponse.model_fields)), VALUE, max_size=6))
def test_bodies_of_any_shape_are_parsed_or_refused_with_a_name(body: dict[str, Any]) -> None:
    try:
        parse(CreateResponse, json.dumps(body).encode())
    except ApiError as error:
        assert error.status == 400
        assert error.param in CreateResponse.model_fields


@pytest.mark.parametrize("url", ["http://[::1", "http://h:99999/v1", "http://", "localhost:8001/v1", "ftp://h/v1"])
def test_a_model_server_s_address_that_is_none_is_told_before_anything_is_served(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigurationError, match="must be like http://HOST:PORT/v1"):
        assemble(GatewaySettings.model_validate({"model_url": url}), tmp_path, NoTools())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": 5}}]},
            "tools.0.container.file_ids: Input should be a valid list",
        ),
        ({"tools": [{"type": "mcp", "server_label": "x", "server_url": [5]}]}, "tools.0.server_url: Input should be"),
        ({"tools": [{"type": "web_search_never"}]}, "tools.0: it is of no known type"),
        ({"tool_choice": {}}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name: Field required"),
    ],
)
async def test_what_is_said_of_a_wrong_body_is_about_what_it_claims_to_be(
    served: Served, body: dict[str, Any], message: str
) -> None:
    answer = await served.http.post("/v1/responses", json={"model": "fake", "input": "Hi", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
