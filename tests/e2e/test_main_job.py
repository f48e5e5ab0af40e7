"""The main job from outside, on each backend: `toolhost serve` as a process, clients over SSE."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import sandboxes, until
from tests.support.host import RunningHost, free_port
from tests.toolhost.rawclient import Stream

pytestmark = pytest.mark.timeout(180)

BEGUN = "/v1/sessions/a/files/begun"
NO_ENGINE = "unix:///nonexistent/docker.sock"
NO_BUBBLEWRAP = """
import sandboxes.backends.bwrap_binary as binary
binary.find = lambda: []
from toolhost.cli import main
main()
"""


async def connect(host: RunningHost, session: str | None, path: str = "/sse", **headers: str) -> Stream:
    pairs = [("x-session-id", session)] if session is not None else []
    stream = await Stream.open(host.port, path, [*pairs, *headers.items()])
    await stream.initialize()
    return stream


async def run(host: RunningHost, session: str, code: str, attempt: str | None = None) -> str:
    """Runs code over a connection of its own."""
    async with await connect(host, session) as stream:
        meta = {"toolhost/attempt-id": attempt} if attempt else None
        return await stream.python(code, meta=meta)


async def test_variables_last_by_session_id_across_connections(host: RunningHost) -> None:
    await run(host, "a", "x = 41")
    assert await run(host, "a", "x + 1") == "42"
    assert "NameError" in await run(host, "b", "x + 1")


async def test_a_killed_host_comes_back_with_variables_and_with_what_was_running(host: RunningHost) -> None:
    await run(host, "a", "x = 41; runs = 0")
    stream = await connect(host, "a")
    params = {
        "name": "python",
        "arguments": {"code": "import time; runs += 1; open('begun', 'w').close(); time.sleep(3); print('done', runs)"},
        "_meta": {"toolhost/attempt-id": "long"},
    }
    await stream.send("tools/call", params)
    await asyncio.to_thread(until, lambda: host.get(BEGUN)[0] == 200, "its code never ran")
    host.kill()
    stream.close()

    await asyncio.to_thread(host.start)
    status, body = await asyncio.to_thread(host.get, "/v1/sessions/a/attempts/long")
    assert status == 200, body
    collected = json.loads(body)
    done = "done 1\n[File written: /mnt/data/begun (0 bytes)]"
    assert collected["text"] == done
    assert collected["receipt"]["ending"] == "ok"
    assert await run(host, "a", "x + 1") == "42"
    again = await run(host, "a", str(params["arguments"]["code"]), attempt="long")  # type: ignore[index]
    assert again == done
    assert await run(host, "a", "runs") == "1", "nothing runs twice"


async def test_there_is_a_sandbox_for_each_session_that_called_and_none_for_who_only_connected(
    host: RunningHost,
) -> None:
    idle = await connect(host, "idle")
    await idle.call("tools/list")
    assert sandboxes(host) == []
    used = await connect(host, "resp_0a")
    await used.python("1")
    async with await connect(host, "resp_0a", "/python/sse") as second:
        await second.python("2")
        await second.tool("cleanup_session")
    assert len(sandboxes(host)) == 1, "the other connection still uses it"
    await used.tool("cleanup_session")
    await asyncio.to_thread(until, lambda: sandboxes(host) == [], "cleanup_session left a sandbox")
    for stream in (idle, used):
        stream.close()


async def test_a_stop_leaves_what_can_be_taken_up_again_and_nothing_else(host: RunningHost) -> None:
    streams = [await connect(host, session) for session in ("chosen", "resp_1", None)]
    for stream in streams:
        await stream.python("x = 1")
    assert len(sandboxes(host)) == 3
    assert await asyncio.to_thread(host.terminate) == 0, host.log_text()
    for stream in streams:
        await stream.ended()
        stream.close()
    assert len(sandboxes(host)) == 1
    await asyncio.to_thread(host.start)
    assert await run(host, "chosen", "x") == "1"
    assert "NameError" in await run(host, "resp_1", "x")


async def test_a_client_that_goes_ends_its_code_and_the_session_goes_on(host: RunningHost) -> None:
    stream = await connect(host, "a")
    await stream.python("x = 5")
    call = {
        "name": "python",
        "arguments": {"code": "import time\nopen('begun', 'w').close()\nwhile True: time.sleep(0.1)"},
    }
    await stream.send("tools/call", {**call, "_meta": {"toolhost/attempt-id": "endless"}})
    await asyncio.to_thread(until, lambda: host.get(BEGUN)[0] == 200, "its code never ran")
    stream.close()
    assert await run(host, "a", "x") == "5"
    collected = await asyncio.to_thread(host.get_json, "/v1/sessions/a/attempts/endless")
    assert collected["receipt"]["ending"] == "interrupted"


async def test_the_endless_and_the_dying_have_defined_results(host: RunningHost) -> None:
    async with await connect(host, "a") as stream:
        await stream.python("x = 1; open('kept.txt', 'w').write('k')")
        text = await stream.python("while True: pass", meta={"toolhost/timeout": 1})
        assert "Timed out after 1 s" in text
        assert await stream.python("x") == "1"
        text = await stream.python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert "SIGKILL" in text
        assert "lost" in text
        assert await stream.python("open('kept.txt').read()") == "'k'"


def test_the_deep_health_check_runs_code_and_leaves_no_session(host: RunningHost) -> None:
    assert host.get_json("/healthz")["status"] == "healthy"
    assert host.get_json("/livez")["status"] == "alive"


async def test_the_host_logs_calls_by_session_and_attempt_and_never_their_code(host: RunningHost) -> None:
    await run(host, "followed", "secret_word = 'XYZZY'", attempt="mine")
    lines: list[dict[str, Any]] = [json.loads(line) for line in host.log_text().splitlines() if line.startswith("{")]
    (call,) = [line for line in lines if line["event"] == "call"]
    assert call["session"] == "anonymous/request/followed"
    assert (call["attempt"], call["epoch"], call["sequence"]) == ("mine", 1, 1)
    assert call["namespace"] == "python"
    assert "XYZZY" not in host.log_text()


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_with_nothing_that_isolates_it_refuses_and_says_what_to_install(tmp_path: Path, command: str) -> None:
    place = ["--listen", f"127.0.0.1:{free_port()}", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(
        [sys.executable, "-c", NO_BUBBLEWRAP, command, *place],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "DOCKER_HOST": NO_ENGINE},
    )
    assert done.returncode == {"serve": 2, "doctor": 1}[command]
    assert "apt install bubblewrap" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_sandbox_environment_it_refuses_and_names_setup(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "toolhost", "serve", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={
            **os.environ,
            "DOCKER_HOST": NO_ENGINE,
            "TOOLHOST_BUBBLEWRAP__ENVIRONMENT_DIR": str(tmp_path / "missing"),
        },
    )
    assert done.returncode == 2
    assert "toolhost setup" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
