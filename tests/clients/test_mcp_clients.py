"""The main job with the official clients of three generations, each from its own environment."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.clients.drive import drive, start
from tests.support.host import RunningHost
from tests.support.trees import find_named
from tests.toolhost.rawclient import Stream

pytestmark = pytest.mark.clients

CLIENTS = ["mcp-1.12", "mcp-1", "mcp-2"]


@pytest.mark.parametrize("path", ["/sse", "/python/sse"])
@pytest.mark.parametrize("client", CLIENTS)
def test_variables_persist_by_session_id_and_only_there(host: RunningHost, client: str, path: str) -> None:
    ours = f"ours-{client}{path.replace('/', '-')}"
    script = [
        {"headers": {"x-session-id": ours}, "calls": [["python", {"code": "x = 41"}]]},
        {"headers": {"x-session-id": ours}, "calls": [["python", {"code": "x + 1"}]]},
        {"headers": {"x-session-id": f"{ours}-other"}, "calls": [["python", {"code": "x"}], ["cleanup_session", {}]]},
        {"headers": {"x-session-id": ours}, "calls": [["cleanup_session", {}]]},
    ]
    report = drive(client, "mcp_sse.py", host.url + path, json.dumps(script))
    assert report["name"] == "python"
    first, second, other, _ = report["connections"]
    assert first[0]["text"]
    assert second[0]["text"] == "42"
    assert "NameError" in other[0]["text"]
    assert not other[0]["is_error"]
    assert all(result["blocks"] == 1 for connection in report["connections"] for result in connection)


@pytest.mark.parametrize("client", CLIENTS)
def test_without_an_id_the_connection_is_the_session(host: RunningHost, client: str) -> None:
    script = [
        {"calls": [["python", {"code": "y = 1"}], ["python", {"code": "y"}]]},
        {"calls": [["python", {"code": "y"}]]},
    ]
    one, two = drive(client, "mcp_sse.py", host.url + "/python/sse", json.dumps(script))["connections"]
    assert one[1]["text"] == "1"
    assert "NameError" in two[0]["text"]


@pytest.mark.parametrize("client", CLIENTS)
def test_bad_arguments_and_tools_come_back_as_texts(host: RunningHost, client: str) -> None:
    script = [
        {
            "headers": {"x-session-id": f"bad-{client}"},
            "calls": [
                ["python", {}],
                ["python", {"code": 7}],
                ["no_such_tool", {}],
                ["python", {"code": "'still here'"}],
                ["cleanup_session", {}],
                ["cleanup_session", {}],
            ],
        }
    ]
    (results,) = drive(client, "mcp_sse.py", host.url + "/sse", json.dumps(script))["connections"]
    assert [result["is_error"] for result in results[:3]] == [True, True, True]
    assert all("code" in result["text"] for result in results[:2])
    assert "no_such_tool" in results[2]["text"] and "python" in results[2]["text"]
    assert results[3]["text"] == "'still here'"


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_that_is_killed_ends_its_code_and_not_its_session(host: RunningHost, client: str) -> None:
    session = f"killed-{client}"
    code = f"import time\ntry:\n  open('{session}', 'w')\n  time.sleep(100)\nexcept KeyboardInterrupt:\n  ended = True"
    leaving = start(client, "mcp_leave.py", f"{host.url}/python/sse", session, code)
    try:
        async with asyncio.timeout(60):
            # The code runs: its file is in the session's workspace, below the host's state.
            while not find_named(host.state_dir, session):
                assert leaving.poll() is None
                await asyncio.sleep(0.05)
    finally:
        leaving.kill()
        leaving.wait(timeout=20)
    async with await Stream.open(host.port, "/python/sse", [("x-session-id", session)]) as stream:
        await stream.initialize()
        assert await stream.python("ended") == "True"
