"""Behind nginx with a path prefix and default buffering: a long call arrives, pings keep the read timeout off."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from tests.support.host import RunningHost, free_port
from tests.toolhost.rawclient import Stream, request

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(180)]

PREFIX = "/tools/one"
CALL_S = 60
READ_TIMEOUT_S = 20

# Buffering is not turned off here: `X-Accel-Buffering: no` of the answers does that. `docs/deploy.md` has this recipe.
CONFIGURATION = """
daemon off;
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location {prefix}/ {{
            proxy_pass http://{host};
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_read_timeout {timeout}s;
        }}
    }}
}}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHost]:
    state_dir = tmp_path_factory.mktemp("behind-nginx") / "state"
    running = RunningHost(state_dir, arguments=["--root-path", PREFIX, "--timeout", "100"]).start()
    yield running
    running.purge()


@pytest.fixture(scope="module")
def proxied(host: RunningHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a running nginx before the host."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("no nginx (apt-get install nginx)")
    directory: Path = tmp_path_factory.mktemp("nginx")
    directory.chmod(0o755)
    port = free_port()
    text = CONFIGURATION.format(
        directory=directory, port=port, prefix=PREFIX, host=host.address, timeout=READ_TIMEOUT_S
    )
    (directory / "nginx.conf").write_text(text)
    process = subprocess.Popen(
        [program, "-c", str(directory / "nginx.conf"), "-e", str(directory / "error.log")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        until_it_answers(process, directory / "nginx.pid")
        yield port
    finally:
        process.terminate()
        process.wait(timeout=20)
        if process.stderr is not None:
            process.stderr.close()


def until_it_answers(process: subprocess.Popen[bytes], pid_file: Path) -> None:
    deadline = time.monotonic() + 20
    while not pid_file.exists() or not pid_file.read_text().strip():
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert time.monotonic() < deadline, "nginx did not start"
        time.sleep(0.02)


async def test_the_prefix_is_in_the_post_path_and_calls_work(proxied: int) -> None:
    async with await Stream.open(proxied, f"{PREFIX}/python/sse", [("x-session-id", "prefix")]) as stream:
        assert stream.endpoint.startswith(f"{PREFIX}/messages/")
        await stream.initialize()
        assert await stream.python("6 * 7") == "42"
    assert (await request(proxied, f"{PREFIX}/livez")).status == 200


async def test_a_long_call_arrives_and_pings_outlast_the_read_timeout(
    proxied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints every second, and none of that is on the wire before its end: only pings keep nginx from giving up."""
    monkeypatch.setattr("tests.toolhost.rawclient.PATIENCE_S", CALL_S + 40.0)
    code = f"import time\nfor n in range({CALL_S}):\n    print('tick', n, flush=True)\n    time.sleep(1)"
    async with await Stream.open(proxied, f"{PREFIX}/python/sse", [("x-session-id", "long")]) as stream:
        await stream.initialize()
        text = await stream.python(code)
    assert text.splitlines()[0] == "tick 0" and f"tick {CALL_S - 1}" in text
    assert len(stream.comments) >= CALL_S // READ_TIMEOUT_S, "pings came through while it ran"


async def test_streamable_http_works_behind_the_prefix_too(proxied: int) -> None:
    async with (
        streamable_http_client(f"http://127.0.0.1:{proxied}{PREFIX}/s/behind/mcp") as streams,
        ClientSession(streams[0], streams[1]) as client,
    ):
        await client.initialize()
        result = await client.call_tool("python", {"code": "6 * 7"})
        assert result.content[0].model_dump()["text"] == "42"
