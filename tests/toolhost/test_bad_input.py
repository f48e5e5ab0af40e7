"""Bad input over SSE: a clear error, nothing created, nothing lost, nobody left waiting."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sandboxes.errors import AttemptConflict, ChannelLost, NoCapacity, SandboxError
from tests.toolhost.conftest import Host, StartHost
from tests.toolhost.rawclient import Stream, request
from toolhost.auth import Scope, mint
from toolhost.transport.sse import MAX_WAITING_BYTES


async def still_works(stream: Stream) -> None:
    assert await stream.python("1 + 1") == "2"


@pytest.mark.parametrize(
    ("body", "ident", "code"),
    [
        (b"{", None, -32700),
        (b"", None, -32700),
        (b"\xff\xfe", None, -32700),
        (b'{"jsonrpc":"2.0","id":77,"method":"tools/call",', 77, -32700),
        (b'{"method":"tools/call","params":{"id":5},"id":"abc"', "abc", -32700),
        (b'{"jsonrpc":"2.0","id":7,"method":"x","params":"\\ud800"}', 7, -32700),
        (b'{"jsonrpc":"2.0","id":78}', 78, -32600),
        (b'{"jsonrpc":"1.0","id":79,"method":"ping"}', 79, -32600),
        (b'{"jsonrpc":"2.0","id":"\\ud800","method":"ping"}', None, -32700),
        (b'{"jsonrpc":"2.0","id":"\\ud83d\\ude00","method":5}', "\U0001f600", -32600),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', None, -32600),
        (b'{"jsonrpc":"2.0","id":1.0,"method":"tools/list"}', None, -32600),
        (b'{"jsonrpc":"2.0","id":1e400,"method":"ping"}', None, -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', None, -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', None, -32600),
        (b'{"jsonrpc":"2.0","id":[1],"method":"ping"}', None, -32600),
        (b'{"jsonrpc":"2.0","method":"ping","params":{},"id":{"id":1}}', None, -32600),
        (b'{"jsonrpc":"2.0","method":"ping","i\\u0064":null}', None, -32600),
        (b'{"jsonrpc":"2.0","id":1,"id":2.5,"method":"ping"}', 1, -32600),
        (b"[]", None, -32600),
        (b"17", None, -32600),
        (b"[" * 100_000, None, -32700),
    ],
)
async def test_a_message_that_is_not_one_gets_an_error_on_the_stream(
    host: Host, body: bytes, ident: object, code: int
) -> None:
    async with await host.connect() as stream:
        assert (await stream.post(body)).status == 202
        message = await stream.message()
        assert message["error"]["code"] == code
        assert message.get("id") == ident
        assert "Nothing ran" in message["error"]["message"]
        assert ("half of a surrogate pair" in message["error"]["message"]) == (b"\\ud800" in body)
        assert host.manager.sessions == {}
        await still_works(stream)


@pytest.mark.parametrize("front", [True, False])
async def test_an_oversized_message_is_answered_for_its_id(start_host: StartHost, front: bool) -> None:
    host = await start_host(server={"max_body_bytes": 2048})
    params: dict[str, Any] = {"name": "python", "arguments": {"code": 'x = {"id": 3}  # "\\' + "x" * 300_000}}
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": "tools/call", "params": params}
    message = {"id": "big", **message} if front else {**message, "id": "big"}
    async with await host.connect() as stream:
        assert (await stream.post(json.dumps(message).encode())).status == 202
        answer = await stream.message()
        assert answer["id"] == "big"
        assert "2048" in answer["error"]["message"]
        assert host.manager.sessions == {}
        await still_works(stream)


async def test_an_oversized_message_without_an_id_ends_its_stream(start_host: StartHost) -> None:
    host = await start_host(server={"max_body_bytes": 2048})
    async with await host.connect() as stream:
        await stream.post(b'{"jsonrpc":"2.0","method":"' + b"x" * 5000 + b'"}')
        await stream.ended()


@pytest.mark.parametrize("name", ["nope", "", None, 7, "python2", "container", "x" * 5000])
async def test_an_unknown_tool_is_named_in_a_text_with_those_there_are(host: Host, name: Any) -> None:
    async with await host.connect() as stream:
        result = await stream.tool(name, {"code": "1"})
        assert result["isError"] is True
        assert "Tools: python" in result["content"][0]["text"]
        assert host.manager.sessions == {}
        await still_works(stream)


@pytest.mark.parametrize("name", ["python ", "python<|channel|>commentary", " python", "python\n"])
async def test_junk_around_a_tool_s_name_is_not_held_against_it(host: Host, name: str) -> None:
    async with await host.connect() as stream:
        assert (await stream.tool(name, {"code": "1 + 1"}))["content"][0]["text"] == "2"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (None, '"code"'),
        ({}, '"code"'),
        ({"script": "1"}, "script"),
        ({"code": 7}, "int"),
        ({"code": None}, '"code"'),
        ({"code": {"a": 1}}, "dict"),
        (["code"], "object"),
        ("1+1", "object"),
    ],
)
async def test_wrong_arguments_get_a_text_that_tells_the_right_ones(host: Host, arguments: Any, word: str) -> None:
    async with await host.connect() as stream:
        result = await stream.tool("python", arguments)
        assert result["isError"] is True
        assert word in result["content"][0]["text"]
        assert host.manager.sessions == {}
        await still_works(stream)


async def test_code_in_a_leaked_schema_is_unwrapped(host: Host) -> None:
    async with await host.connect() as stream:
        assert await stream.python('{"code": "6*7"}') == "42"
        assert await stream.python('{"code": 1}') == "{'code': 1}"
        assert await stream.python('{"other": "6*7"}') == "{'other': '6*7'}"


@pytest.mark.parametrize("meta", [{"toolhost/timeout": "soon"}, {"toolhost/timeout": -1}, {"toolhost/attempt-id": 5}])
async def test_wrong_meta_gets_a_text_and_runs_nothing(host: Host, meta: dict[str, Any]) -> None:
    async with await host.connect() as stream:
        result = await stream.tool("python", {"code": "1"}, meta=meta)
        assert result["isError"] is True
        assert "Nothing ran" in result["content"][0]["text"]
        assert host.manager.executions == []


async def test_a_timeout_is_taken_within_the_operator_s_bound(start_host: StartHost) -> None:
    host = await start_host(python={"max_timeout_s": 200.0})
    async with await host.connect() as stream:
        await stream.python("1")
        await stream.python("1", meta={"toolhost/timeout": 5})
        await stream.python("1", meta={"toolhost/timeout": 9999})
    assert [execution.timeout_s for execution in host.manager.executions] == [120.0, 5.0, 200.0]


async def test_requests_before_initialization_are_told_so(host: Host) -> None:
    async with await Stream.open(host.port) as stream:
        for method, params in (("tools/list", {}), ("tools/call", {"name": "python", "arguments": {"code": "1"}})):
            answer = await stream.call(method, params)
            assert "initialize" in answer["error"]["message"]
        assert host.manager.sessions == {}


async def connections(host: Host, number: int) -> None:
    """Waits until so many are left."""
    async with asyncio.timeout(15):
        while len(host.app.sse) > number:  # noqa: ASYNC110  # the host tells nobody that a connection has ended
            await asyncio.sleep(0.02)


async def test_a_client_that_sends_and_never_reads_is_cut_before_it_takes_the_host_s_memory(host: Host) -> None:
    ident = "x" * 100_000
    ping = json.dumps({"jsonrpc": "2.0", "id": ident, "method": "ping"}).encode()
    async with await host.connect() as other:
        stream = await host.connect()
        try:
            for _ in range(1000):  # what the kernel takes, and what the host holds for it
                if (await stream.post(ping)).status == 404:
                    break
            else:
                raise AssertionError("never cut")
            await connections(host, 1)
            await still_works(other)
        finally:
            stream.close()


async def test_a_client_that_reads_may_send_as_much_as_it_likes(host: Host) -> None:
    ping = json.dumps({"jsonrpc": "2.0", "id": "x" * 1_000_000, "method": "ping"}).encode()
    async with await host.connect() as stream:
        for _ in range(2 * MAX_WAITING_BYTES // len(ping)):
            await stream.post(ping)
            assert len((await stream.message())["id"]) == 1_000_000
        await still_works(stream)


async def test_connections_are_bounded_with_a_text_that_names_the_limit(start_host: StartHost) -> None:
    host = await start_host(server={"max_connections": 2, "max_connections_per_principal": 2})
    async with await host.connect() as one, await host.connect():
        answer = await request(host.port, "/python/sse")
        assert answer.status == 503
        assert b"server.max_connections" in answer.body
        assert answer.header("retry-after")
        await still_works(one)
    await connections(host, 0)
    async with await host.connect() as again:
        await still_works(again)


async def test_one_principal_cannot_take_every_connection(start_host: StartHost, tmp_path: Path) -> None:
    alice, first = mint("alice", [Scope.USE])
    bob, second = mint("bob", [Scope.USE])
    (tmp_path / "tokens").write_text(f"{first}\n{second}\n")
    host = await start_host(auth={"tokens_file": str(tmp_path / "tokens")}, server={"max_connections_per_principal": 1})
    as_alice, as_bob = [("Authorization", f"Bearer {alice}")], [("Authorization", f"Bearer {bob}")]
    async with await host.connect(headers=as_alice):
        answer = await request(host.port, "/python/sse", headers=as_alice)
        assert answer.status == 503
        assert b"max_connections_per_principal" in answer.body
        async with await host.connect(headers=as_bob) as stream:
            await still_works(stream)


# --- sessions --------------------------------------------------------------------------------------------------------

BAD_IDS = ["", " ", "x" * 129, "x" * 20_000, "a/../../b c", "a,b", "é", "a\tb", "{}", "a%00b"]


@pytest.mark.parametrize("ident", BAD_IDS)
@pytest.mark.parametrize("header", ["x-session-id", "x-toolhost-session"])
async def test_an_invalid_session_id_is_told_with_every_call_and_creates_nothing(
    host: Host, ident: str, header: str
) -> None:
    async with await host.connect(headers=[(header, ident)]) as stream:
        await stream.call("tools/list")
        result = await stream.tool("python", {"code": "1"})
        assert result["isError"] is True
        assert header in result["content"][0]["text"]
        assert host.manager.sessions == {}


async def test_two_different_session_ids_are_refused_and_two_equal_ones_are_one(host: Host) -> None:
    twice = [("x-session-id", "a"), ("X-Session-Id", "b")]
    async with await host.connect(headers=twice) as stream:
        assert "2 different values" in await stream.python("1")
    async with await host.connect(headers=[("x-session-id", "a"), ("X-Session-Id", "a")]) as stream:
        assert await stream.python("1") == "1"
    assert [key.id for key in host.manager.sessions] == ["a"]


async def test_a_post_with_another_session_header_runs_nothing(host: Host) -> None:
    async with await host.connect(headers=[("x-session-id", "a")]) as stream:
        text = await stream.python("1", headers=[("x-session-id", "b")])
        assert "differs" in text
        assert host.manager.sessions == {}
        assert await stream.python("1", headers=[]) == "1"
        assert [key.id for key in host.manager.sessions] == ["a"]


@pytest.mark.parametrize("value", ["0", "-3", "soon", "inf", "nan", ""])
async def test_an_invalid_time_to_live_is_told(host: Host, value: str) -> None:
    async with await host.connect(headers=[("x-toolhost-session", "k"), ("x-toolhost-ttl", value)]) as stream:
        assert "x-toolhost-ttl" in await stream.python("1")


# --- failures of the host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (NoCapacity("at capacity: 20 sessions", retry_after_s=7), ["at capacity", "Retry in 7 s"]),
        (ChannelLost("the sandbox does not answer"), ["may still run"]),
        (AttemptConflict("attempt id used before with other arguments"), ["used before"]),
        (SandboxError("something else"), ["tool host failed"]),
        (RuntimeError("secret detail"), ["tool host failed"]),
    ],
)
async def test_a_failure_of_the_host_is_text_for_the_model(host: Host, failure: Exception, words: list[str]) -> None:
    host.manager.failure = failure
    async with await host.connect() as stream:
        result = await stream.tool("python", {"code": "1"})
        assert result["isError"] is True
        (block,) = result["content"]
        assert all(word in block["text"] for word in words), block
        assert "secret" not in block["text"]


async def test_too_many_calls_at_once_are_refused_with_a_text(start_host: StartHost) -> None:
    host = await start_host(server={"max_calls": 1})
    async with await host.connect() as stream:
        await stream.send("tools/call", {"name": "python", "arguments": {"code": "wait"}})
        await host.manager.until("running")
        assert "in flight" in await stream.python("1")


# --- other users -----------------------------------------------------------------------------------------------------


async def test_an_unknown_connection_is_404(host: Host) -> None:
    answer = await request(host.port, "/messages/00", method="POST", body=b"{}")
    assert answer.status == 404


async def test_posts_with_wrong_and_with_another_s_credentials_run_nothing(
    start_host: StartHost, tmp_path: Any
) -> None:
    alice, first = mint("alice", [Scope.USE])
    bob, second = mint("bob", [Scope.USE])
    file = tmp_path / "tokens"
    file.write_text(f"# who may\n{first}\n{second}\n")
    host = await start_host(auth={"tokens_file": str(file)})
    as_alice, as_bob = [("Authorization", f"Bearer {alice}")], [("Authorization", f"Bearer {bob}")]
    call = b'{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"name":"python","arguments":{"code":"1"}}}'

    assert (await request(host.port, "/python/sse")).status == 401
    async with await host.connect(headers=[*as_alice, ("x-session-id", "s")]) as stream:
        assert (await stream.post(call, headers=as_bob)).status == 404
        refused = await stream.post(call, headers=[("Authorization", "Bearer wrong")])
        assert refused.status == 401
        assert refused.header("www-authenticate")
        assert host.manager.executions == []
        await still_works(stream)
    async with await host.connect(headers=[*as_bob, ("x-session-id", "s")]) as stream:
        await still_works(stream)
    assert {str(key) for key in host.manager.sessions} == {"alice/request/s", "bob/request/s"}


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example:80", "169.254.169.254"])
async def test_a_loopback_host_refuses_foreign_host_names(host: Host, name: str) -> None:
    stream = await Stream.open(host.port, host=name)
    stream.close()
    assert stream.status == 421


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1:1", "[::1]:8000", "LOCALHOST:8000", "127.8.9.1"])
async def test_a_loopback_host_takes_every_loopback_name(host: Host, name: str) -> None:
    async with await Stream.open(host.port, host=name) as stream:
        assert stream.status == 200


async def test_a_page_of_another_origin_is_refused_on_loopback(host: Host) -> None:
    stream = await Stream.open(host.port, headers=[("Origin", "https://evil.example")])
    stream.close()
    assert stream.status == 403


async def test_an_explicit_list_of_host_names_is_kept(start_host: StartHost) -> None:
    host = await start_host(server={"allowed_hosts": ["toolhost"]})
    for name, status in (("toolhost:8000", 200), ("other:8000", 421)):
        stream = await Stream.open(host.port, host=name)
        stream.close()
        assert stream.status == status
