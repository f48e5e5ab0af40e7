"""What went wrong with other tool servers, by public report, and the tests here that hold it for this host."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
from collections import Counter

import psutil
import pytest
from mcp import ClientSession
from mcp.client.sse import sse_client

from tests.toolhost.conftest import Host, StartHost
from tests.toolhost.rawclient import Stream, request
from toolhost.transport.sse import Connection

# From, what happens, and the tests that hold that it does not happen here ("module::test").
CASES = [
    (
        "modelcontextprotocol/python-sdk#1798",
        "421 Invalid Host off localhost",
        ["tests.toolhost.test_tool_server_cases::test_off_loopback_every_host_header_is_taken"],
    ),
    (
        "vllm-project/vllm#53855",
        "an mcp 2 client against a world of mcp 1, and the reverse",
        [
            "tests.clients.test_mcp_clients::test_variables_persist_by_session_id_and_only_there",
            "tests.clients.test_vllm::test_harmony_context_runs_three_turns_that_share_state",
        ],
    ),
    (
        "vllm-project/vllm#56988",
        "cleanup_session twice, or late",
        [
            "tests.toolhost.test_sse::test_cleanup_is_idempotent_and_answers_text_also_while_a_call_runs",
            "tests.sandboxes.test_manager::test_a_clean_up_while_code_runs_ends_it_and_does_not_start_anew",
        ],
    ),
    (
        "vllm-project/vllm#25697",
        "streaming: the close may be lost",
        ["tests.sandboxes.test_manager::test_idle_time_and_lifetime_end_sessions_also_with_a_connection_open"],
    ),
    (
        "vllm-project/vllm#25790",
        "sessions are opened and never used",
        [
            "tests.toolhost.test_sse::test_connecting_and_listing_create_nothing",
            "tests.e2e.test_main_job::"
            "test_there_is_a_sandbox_for_each_session_that_called_and_none_for_who_only_connected",
        ],
    ),
    (
        "vllm-project/vllm#52521",
        "a client replaces the session id",
        [
            "tests.toolhost.test_bad_input::test_two_different_session_ids_are_refused_and_two_equal_ones_are_one",
            "tests.toolhost.test_bad_input::test_a_post_with_another_session_header_runs_nothing",
            "tests.toolhost.test_bad_input::test_posts_with_wrong_and_with_another_s_credentials_run_nothing",
        ],
    ),
    (
        "vllm-project/vllm#26703",
        "only three namespaces are dispatched",
        ["tests.toolhost.test_doctor_vllm::test_every_namespace_is_one_that_vllm_dispatches"],
    ),
    (
        "vllm-project/vllm#29989",
        "cmd is missing, a string, or JSON text",
        [
            "tests.toolhost.test_container::test_a_command_is_taken_in_every_form_that_models_send",
            "tests.toolhost.test_container::test_missing_and_mistaken_commands_come_back_as_texts",
            "tests.clients.test_vllm::test_python_and_container_share_a_file_and_shells_remember",
        ],
    ),
    (
        "vllm-project/vllm#31761",
        "it did not output",
        ["tests.toolhost.test_render::test_silence_is_said_with_how_to_see_a_value"],
    ),
    (
        "modelcontextprotocol/python-sdk#2483",
        "an error status to a POST is swallowed, and the client hangs",
        [
            "tests.toolhost.test_bad_input::test_a_message_that_is_not_one_gets_an_error_on_the_stream",
            "tests.toolhost.test_bad_input::test_an_oversized_message_is_answered_for_its_id",
        ],
    ),
    (
        "modelcontextprotocol/python-sdk#646",
        "a long call kills the stream",
        [
            "tests.toolhost.test_sse::test_a_comment_keeps_an_idle_stream_alive",
            "tests.e2e.test_nginx::test_a_long_call_arrives_and_pings_outlast_the_read_timeout",
        ],
    ),
    (
        "modelcontextprotocol/python-sdk#2214",
        "`before initialization` after a restart",
        [
            "tests.toolhost.test_bad_input::test_requests_before_initialization_are_told_so",
            "tests.e2e.test_main_job::test_a_killed_host_comes_back_with_variables_and_with_what_was_running",
        ],
    ),
    (
        "modelcontextprotocol/python-sdk#2200",
        "connections leak",
        ["tests.toolhost.test_tool_server_cases::test_hundreds_of_connections_that_end_in_any_way_leave_nothing"],
    ),
    (
        "modelcontextprotocol/python-sdk#514",
        "a shutdown hangs with a stream open",
        [
            "tests.toolhost.test_serve::test_a_signal_ends_it_in_order_with_a_stream_open_and_a_call_running",
            "tests.toolhost.test_serve::test_a_stop_that_hangs_is_bounded",
        ],
    ),
    (
        "modelcontextprotocol/python-sdk#412",
        "the path prefix is lost behind a mount or proxy",
        [
            "tests.toolhost.test_sse::test_the_endpoint_event_carries_the_prefix_and_posts_arrive_with_and_without_it",
            "tests.e2e.test_nginx::test_the_prefix_is_in_the_post_path_and_calls_work",
        ],
    ),
    (
        "modelcontextprotocol/typescript-sdk#2541",
        "proxies hold pings back",
        ["tests.toolhost.test_sse::test_stream_headers_keep_proxies_from_buffering_and_caching"],
    ),
    (
        "anthropics/claude-ai-mcp#583",
        "a new Mcp-Session-Id with every call",
        ["tests.toolhost.test_http::test_a_header_or_the_url_names_the_session_across_mcp_sessions"],
    ),
    (
        "itasca-mcp#113",
        "HTTP_PROXY applies to local hosts",
        [
            "tests.toolhost.test_cli::test_doctor_names_proxies",
            "tests.toolhost.test_doctor_vllm::test_a_proxy_that_applies_to_the_host_s_name_is_wrong",
        ],
    ),
    (
        "openai/gpt-oss#199",
        "functions.browser.search",
        ["tests.toolhost.loop.test_scenarios::expect_aliases"],
    ),
    (
        "observed",
        "a streaming client leaves: the stream just closes, no cancel and no clean-up",
        [
            "tests.clients.test_mcp_clients::test_a_client_that_is_killed_ends_its_code_and_not_its_session",
            "tests.toolhost.test_sse::test_a_client_that_goes_interrupts_its_code_and_everything_of_it_is_freed",
            "tests.sandboxes.test_manager::test_a_request_that_goes_without_cleaning_up_has_a_grace_to_come_back",
        ],
    ),
    (
        "observed",
        "x-session-id of 20,000 characters, empty, or a path",
        ["tests.toolhost.test_bad_input::test_an_invalid_session_id_is_told_with_every_call_and_creates_nothing"],
    ),
    (
        "observed",
        "tools/list is awaited before the first result is delivered",
        ["tests.toolhost.test_tool_server_cases::test_listing_again_and_again_is_answered_from_what_is_ready"],
    ),
    (
        "observed",
        "two responses share an id; the first one's clean-up wiped the other's state",
        [
            "tests.sandboxes.test_manager::"
            "test_a_requests_session_closes_when_its_last_attached_connection_has_cleaned_up"
        ],
    ),
]


@pytest.mark.parametrize(("reported", "what", "tests"), CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES])
def test_every_case_is_held_by_tests_that_are_there(reported: str, what: str, tests: list[str]) -> None:
    assert tests, f"{reported}: {what}"
    for name in tests:
        module, _, function = name.partition("::")
        assert callable(getattr(importlib.import_module(module), function, None)), f"{name} is gone; it held: {what}"


# --- the cases that have no better place -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["toolhost:8000", "tools.example", "10.1.2.3:80", "[fd00::1]:8000", "TOOLHOST"])
async def test_off_loopback_every_host_header_is_taken(start_host: StartHost, name: str) -> None:
    host = await start_host(server={"listen": "0.0.0.0:8000"}, auth={"insecure": True})
    async with await Stream.open(host.port, host=name) as stream:
        assert stream.status == 200
        await stream.initialize()
        assert await stream.python("1") == "1"
    assert (await request(host.port, "/livez", host=name)).status == 200


async def test_an_ipv6_address_is_listened_on_and_named(start_host: StartHost) -> None:
    host = await start_host(server={"listen": "[::1]:0"})
    async with (
        sse_client(f"http://[::1]:{host.port}/python/sse") as streams,
        ClientSession(*streams) as client,
    ):
        await client.initialize()
        result = await client.call_tool("python", {"code": "6 * 7"})
        assert result.content[0].model_dump()["text"] == "42"


async def test_listing_again_and_again_is_answered_from_what_is_ready(host: Host) -> None:
    async with await host.connect() as stream:
        first = (await stream.call("tools/list"))["result"]
        for _ in range(100):
            assert (await stream.call("tools/list"))["result"] == first
    assert host.manager.sessions == {} and host.manager.executions == []


async def test_hundreds_of_connections_that_end_in_any_way_leave_nothing(host: Host) -> None:
    await use_and_leave(host, 0)  # what the first use makes once is not a leak
    before = held()
    for number in range(1, 301, 20):
        await asyncio.gather(*(use_and_leave(host, number + n) for n in range(20)))
    async with asyncio.timeout(20):
        while len(host.app.sse) or held() - before:
            await asyncio.sleep(0.05)
            gc.collect()
    assert held() - before == Counter()
    assert sum(event.startswith("gone ") for event in host.manager.events) == 301


async def use_and_leave(host: Host, number: int) -> None:
    """Connects and goes: after a call, in the middle of one, with a clean-up, half-way through a request, at once."""
    stream = await Stream.open(host.port, headers=[("x-session-id", f"soak-{number}")])
    how = number % 5
    if how < 3:
        await stream.initialize()
        await stream.python("1")
    if how == 1:
        await stream.send("tools/call", {"name": "python", "arguments": {"code": "wait"}})
    if how == 2:
        await stream.tool("cleanup_session")
    if how == 3:
        stream.writer.transport.abort()
    stream.close()


def held() -> Counter[str]:
    """What a connection that is not freed would still have."""
    found = Counter({"descriptors": psutil.Process(os.getpid()).num_fds(), "tasks": len(asyncio.all_tasks())})
    found["connections"] = sum(isinstance(thing, Connection) for thing in gc.get_objects())
    return found
