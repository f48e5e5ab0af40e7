"""The SSE endpoints on the wire, by their bytes."""

from __future__ import annotations

import json

import pytest

from tests.toolhost.conftest import Host
from tests.toolhost.rawclient import Stream


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
            assert tool["_meta"] == {"include_in_prompt": False}
            assert tool["description"]
        assert stream.raw.count(b'"include_in_prompt":false') == 4
        assert host.manager.sessions == {}
