"""The path of calls beside the SDK's dispatcher: the same bytes, the same ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandboxes.events import OnEvent, Printed
from sandboxes.spec import Outcome
from tests.toolhost.conftest import Host
from tests.toolhost.rawclient import Stream
from tests.toolhost.standin import StandInAttachment
from tests.toolhost.test_render import outcome
from toolhost.transport.direct import Direct

TEXTS = ["6*7", "'é ü \u2028 \U0001f600 \x7f'", "'\\x00\\x1f\"'", "'</script>'", "1e400", "1/0"]
MESSAGES: list[dict[str, Any]] = [
    *({"method": "tools/call", "params": {"name": "python", "arguments": {"code": text}}} for text in TEXTS),
    {"method": "tools/list", "params": {}},
    {"method": "tools/list", "params": {"cursor": "x"}},
    {"method": "tools/list"},
    {"method": "tools/call", "params": {"name": "python", "arguments": "no"}},
    {"method": "tools/call", "params": {"name": "python", "arguments": {}, "_meta": []}},
    {"method": "tools/call", "params": {"name": "nothing"}},
    {"method": "tools/call", "params": {}},
    {"method": "tools/call"},
    {"method": "tools/call", "params": [1]},
    {"method": "ping"},
    {"method": "resources/templates/list", "params": {}},
    {"method": "no/such", "params": {}},
]
IDS: list[object] = [7, "7", "text", -1, 2**60, "", True, 1.5, None, {}]


async def answers(host: Host, messages: list[bytes]) -> bytes:
    """The bytes of the stream after the handshake. A last message that is always answered tells that all came."""
    async with await host.connect(headers=[("x-session-id", "a")]) as stream:
        await stream.python("0")
        before = len(stream.raw)
        for message in messages:
            await stream.post(message)
            if b'"id"' in message:
                await stream.message()
        return stream.raw[before:]


def lines(identity: object = 7) -> list[bytes]:
    return [json.dumps({"jsonrpc": "2.0", "id": identity, **message}).encode() for message in MESSAGES]


async def both_ways(host: Host, monkeypatch: pytest.MonkeyPatch, messages: list[bytes]) -> tuple[bytes, bytes]:
    async def refuse(_self: Direct, _body: bytes, _headers: object) -> bool:
        return False

    direct = await answers(host, messages)
    with monkeypatch.context() as patched:
        patched.setattr(Direct, "take", refuse)
        return direct, await answers(host, messages)


async def test_every_message_is_answered_as_the_sdk_answers_it_byte_for_byte(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.manager.outcome = outcome(value='fixed: é ü \u2028 \U0001f600 \x7f " \\ </a>')
    direct, sdk = await both_ways(host, monkeypatch, lines())
    assert direct.count(b"event: message") == len(MESSAGES)
    assert direct == sdk


@pytest.mark.parametrize("ident", IDS, ids=repr)
async def test_every_kind_of_id_is_answered_as_the_sdk_answers_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, ident: object
) -> None:
    host.manager.outcome = outcome(value="1")
    message = {"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": {"name": "python", "arguments": {}}}
    direct, sdk = await both_ways(host, monkeypatch, [json.dumps(message).encode()])
    assert direct == sdk
    assert direct.count(b"event: message") == 1


async def test_a_call_before_initialization_does_not_run(host: Host) -> None:
    async with await Stream.open(host.port, "/python/sse") as stream:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
        await stream.post(json.dumps({**message, "params": {"name": "python", "arguments": {"code": "1"}}}).encode())
        assert "initialize" in (await stream.message())["error"]["message"]
        assert host.manager.sessions == {}


async def test_a_call_is_cancelled_by_the_text_of_its_number_too_and_is_not_answered(host: Host) -> None:
    async with await host.connect() as stream:
        ident = await stream.send("tools/call", {"name": "python", "arguments": {"code": "wait"}})
        await host.manager.until("running")
        body = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": str(ident)}}
        await stream.post(json.dumps(body).encode())
        await host.manager.until("interrupted")
        before = len(stream.raw)
        assert await stream.python("1 + 1") == "2"
        assert stream.raw[before:].count(b"event: message") == 1


async def test_a_call_that_the_end_of_the_host_cuts_off_is_answered_with_an_error(host: Host) -> None:
    async with await host.connect() as stream:
        await stream.send("tools/call", {"name": "python", "arguments": {"code": "wait"}})
        await host.manager.until("running")
        await host.app.sse.close()
        assert (await stream.message())["error"] == {"code": -32000, "message": "Connection closed"}
        await stream.ended()
    await host.manager.until("interrupted")


async def test_progress_goes_out_as_the_sdk_sends_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"name": "python", "arguments": {"code": "1"}, "_meta": {"progressToken": "t"}}
    message = json.dumps({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params}).encode()

    async def run(_self: object, _execution: object, on_event: OnEvent | None = None) -> Outcome:
        assert on_event is not None
        on_event(Printed("a", "é 1\n"))
        return outcome(value="1")

    monkeypatch.setattr(StandInAttachment, "run", run)

    async def seen() -> bytes:
        async with await host.connect(headers=[("x-session-id", "a")]) as stream:
            before = len(stream.raw)
            await stream.post(message)
            while (await stream.message()).get("id") != 3:
                pass
            return stream.raw[before:]

    direct = await seen()

    async def refuse(_self: Direct, _body: bytes, _headers: object) -> bool:
        return False

    monkeypatch.setattr(Direct, "take", refuse)
    assert direct == await seen()
    assert b"notifications/progress" in direct
