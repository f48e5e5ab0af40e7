"""The SSE endpoints on the wire, by their bytes."""

from __future__ import annotations

import json

import pytest

from sandboxes.spec import FileRef, ImageRef
from tests.toolhost.conftest import Host, StartHost
from tests.toolhost.rawclient import Stream, request
from tests.toolhost.test_render import outcome


async def test_state_lasts_across_connections_of_one_session_id(host: Host) -> None:
    async with await host.connect(headers=[("x-session-id", "a")]) as first:
        await first.python("x = 41")
    async with await host.connect(headers=[("x-session-id", "a")]) as second:
        assert await second.python("x + 1") == "42"
    async with await host.connect(headers=[("x-session-id", "b")]) as other:
        assert "NameError" in await other.python("x + 1")


async def test_both_hiding_flags_are_in_the_raw_bytes_of_the_tool_list(host: Host) -> None:
    async with await host.connect() as stream:
        answer = await stream.call("tools/list")
        tools = {tool["name"]: tool for tool in answer["result"]["tools"]}
        assert set(tools) == {"python", "cleanup_session"}
        for tool in tools.values():
            assert tool["annotations"]["include_in_prompt"] is False
            assert tool["_meta"]["include_in_prompt"] is False
            assert tool["description"]
        assert stream.raw.count(b'"include_in_prompt":false') == 4
        assert host.manager.sessions == {}


async def test_a_result_is_exactly_one_text_block_with_a_receipt(host: Host) -> None:
    async with await host.connect() as stream:
        result = await stream.tool("python", {"code": "6*7"}, meta={"toolhost/attempt-id": "mine"})
        assert result["content"] == [{"type": "text", "text": "42"}]
        assert result["isError"] is False
        assert "structuredContent" not in result
        assert result["_meta"]["toolhost/receipt"]["attempt_id"] == "mine"


async def test_code_that_raises_is_not_an_error_of_the_tool(host: Host) -> None:
    async with await host.connect() as stream:
        result = await stream.tool("python", {"code": "1/0"})
        assert result["isError"] is False
        assert "ZeroDivisionError" in result["content"][0]["text"]


async def test_a_client_that_asks_for_rich_content_gets_it_after_the_text(host: Host) -> None:
    image = ImageRef("/mnt/data/f.png", "image/png")
    host.manager.outcome = outcome(value="1", images=(image,), files=(FileRef("/mnt/data/t.csv", 5),))
    host.manager.contents["/mnt/data/f.png"] = b"png"
    async with await host.connect(headers=[("x-toolhost-content", "rich")]) as stream:
        result = await stream.tool("python", {"code": "plot()"})
        assert [block["type"] for block in result["content"]] == ["text", "image", "resource_link"]
        assert result["content"][2]["mimeType"] == "text/csv"
        assert result["structuredContent"]["receipt"]["sequence"] == 2
    async with await host.connect() as stream:
        result = await stream.tool("python", {"code": "plot()"})
        assert [block["type"] for block in result["content"]] == ["text"]


async def test_text_that_no_json_can_carry_still_arrives(host: Host) -> None:
    host.manager.outcome = outcome(value="a\ud800b")
    async with await host.connect() as stream:
        assert await stream.python("1") == "a?b"


async def test_connecting_and_listing_create_nothing(host: Host) -> None:
    async with await host.connect(headers=[("x-session-id", "a")]) as stream:
        await stream.call("tools/list")
        await stream.call("ping")
        assert host.manager.sessions == {}
        await stream.python("1")
        assert len(host.manager.sessions) == 1


async def test_bare_sse_is_the_root_namespace_and_its_name_is_the_namespace(host: Host) -> None:
    stream = await Stream.open(host.port, "/sse")
    async with stream:
        answer = await stream.initialize()
        assert answer["result"]["serverInfo"]["name"] == "python"
        assert "stateful" in answer["result"]["instructions"]


async def test_stream_headers_keep_proxies_from_buffering_and_caching(host: Host) -> None:
    async with await host.connect() as stream:
        headers = dict(stream.headers)
        assert headers["x-accel-buffering"] == "no"
        assert "no-store" in headers["cache-control"]
        assert headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", ["/python/sse", "/python/sse/", "/python//sse", "/s/key-1/python/sse", "/s/key-1/sse"])
async def test_every_form_of_the_path_answers_without_a_redirect(host: Host, path: str) -> None:
    async with await host.connect(path) as stream:
        assert await stream.python("1 + 1") == "2"


async def test_the_url_names_a_retained_session_even_when_a_client_also_sends_a_session_id(host: Host) -> None:
    async with await host.connect("/s/key-1/python/sse", [("x-session-id", "resp_1")]) as stream:
        await stream.python("x = 1")
    async with await host.connect(headers=[("x-toolhost-session", "key-1")]) as stream:
        assert await stream.python("x") == "1"
    assert [str(key) for key in host.manager.sessions] == ["anonymous/retained/key-1"]


async def test_the_endpoint_event_carries_the_prefix_and_posts_arrive_with_and_without_it(
    start_host: StartHost,
) -> None:
    host = await start_host(server={"root_path": "/tools/x"})
    async with await host.connect("/tools/x/python/sse") as stream:
        assert stream.endpoint.startswith("/tools/x/messages/")
        assert await stream.python("1 + 1") == "2"
        stream.endpoint = stream.endpoint.removeprefix("/tools/x")
        assert await stream.python("1 + 2") == "3"


async def test_the_public_path_replaces_the_prefix_in_the_endpoint_event(start_host: StartHost) -> None:
    host = await start_host(server={"public_path": "/host-7"})
    async with await Stream.open(host.port, "/python/sse") as stream:
        assert stream.endpoint.startswith("/host-7/messages/")


async def test_a_comment_keeps_an_idle_stream_alive(start_host: StartHost) -> None:
    host = await start_host(server={"ping_s": 0.05})
    async with await host.connect() as stream:
        assert (await stream.comment()).startswith(b": ping")


async def test_connection_ids_cannot_be_guessed(host: Host) -> None:
    async with await Stream.open(host.port) as one, await Stream.open(host.port) as two:
        first, second = one.endpoint.rpartition("/")[2], two.endpoint.rpartition("/")[2]
        assert first != second
        assert len(bytes.fromhex(first)) >= 16


async def test_unknown_namespaces_and_methods_are_refused_with_what_there_is(host: Host) -> None:
    answer = await request(host.port, "/nothing/sse")
    assert (answer.status, b"/python/sse" in answer.body) == (404, True)
    answer = await request(host.port, "/python/sse", method="POST")
    assert (answer.status, answer.header("allow")) == (405, "GET")


# --- ends of connections ---------------------------------------------------------------------------------------------


async def test_a_cancelled_call_is_interrupted_and_the_next_one_works(host: Host) -> None:
    async with await host.connect() as stream:
        ident = await stream.send("tools/call", {"name": "python", "arguments": {"code": "wait"}})
        await host.manager.until("running")
        body = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ident}}
        await stream.post(json.dumps(body).encode())
        await host.manager.until("interrupted")
        assert await stream.python("1 + 1") == "2"


async def test_a_client_that_goes_interrupts_its_code_and_everything_of_it_is_freed(host: Host) -> None:
    stream = await host.connect(headers=[("x-session-id", "a")])
    await stream.send("tools/call", {"name": "python", "arguments": {"code": "wait"}})
    await host.manager.until("running")
    stream.close()
    await host.manager.until("interrupted")
    await host.manager.until("gone anonymous/request/a")
    assert len(host.app.sse) == 0


async def test_cleanup_is_idempotent_and_answers_text_also_while_a_call_runs(host: Host) -> None:
    async with await host.connect(headers=[("x-session-id", "a")]) as stream:
        await stream.send("tools/call", {"name": "python", "arguments": {"code": "wait"}})
        await host.manager.until("running")
        for _ in range(2):
            result = await stream.tool("cleanup_session")
            assert result["content"][0]["text"]
            assert result["isError"] is False


async def test_a_connection_without_a_session_id_is_a_session_of_its_own(host: Host) -> None:
    async with await host.connect() as one, await host.connect() as two:
        await one.python("x = 1")
        assert "NameError" in await two.python("x")
        (mine, _) = host.manager.sessions
        assert mine.kind == "connection"
        one.close()
        await host.manager.until(f"gone {mine}")
        assert mine not in host.manager.sessions


async def test_closing_the_host_ends_open_streams(host: Host) -> None:
    async with await host.connect() as stream:
        await host.app.close()
        await stream.ended()
    answer = await request(host.port, "/python/sse")
    assert answer.status == 503


async def test_many_connections_leave_nothing_behind(host: Host) -> None:
    for number in range(50):
        async with await host.connect(headers=[("x-session-id", f"s{number}")]) as stream:
            await stream.python("1")
        await host.manager.until(f"gone anonymous/request/s{number}")
    assert len(host.app.sse) == 0
