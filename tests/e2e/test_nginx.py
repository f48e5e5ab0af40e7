"""Behind nginx with a path prefix and default buffering: a long call arrives, pings keep the read timeout off."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx2
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
    {servers}
}}
"""
ONE_HOST = """
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
    port = free_port()
    servers = ONE_HOST.format(port=port, prefix=PREFIX, host=host.address, timeout=READ_TIMEOUT_S)
    with nginx(tmp_path_factory.mktemp("nginx"), servers):
        yield port


@contextmanager
def nginx(directory: Path, servers: str) -> Iterator[None]:
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("no nginx (apt-get install nginx)")
    for parent in (directory, directory.parent):
        parent.chmod(0o755)  # its workers run as another user
    (directory / "nginx.conf").write_text(CONFIGURATION.format(directory=directory, servers=servers))
    process = subprocess.Popen(
        [program, "-c", str(directory / "nginx.conf"), "-e", str(directory / "error.log")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        until_it_answers(process, directory / "nginx.pid")
        yield
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

    async def over_sse() -> str:
        async with await Stream.open(proxied, f"{PREFIX}/python/sse", [("x-session-id", "long")]) as stream:
            await stream.initialize()
            text = await stream.python(code)
            assert len(stream.comments) >= CALL_S // READ_TIMEOUT_S, "pings came through while it ran"
            return text

    async def over_http() -> str:
        async with behind(proxied, "long-http") as client:
            result = await client.call_tool("python", {"code": code})
            return str(result.content[0].model_dump()["text"])

    for text in await asyncio.gather(over_sse(), over_http()):
        assert text.splitlines()[0] == "tick 0" and f"tick {CALL_S - 1}" in text


async def test_streamable_http_works_behind_the_prefix_too(proxied: int) -> None:
    async with behind(proxied, "short") as client:
        result = await client.call_tool("python", {"code": "6 * 7"})
        assert result.content[0].model_dump()["text"] == "42"


@asynccontextmanager
async def behind(port: int, session: str) -> AsyncIterator[ClientSession]:
    async with (
        httpx2.AsyncClient(timeout=CALL_S + 40.0) as http,
        streamable_http_client(f"http://127.0.0.1:{port}{PREFIX}/s/{session}/mcp", http_client=http) as streams,
        ClientSession(streams[0], streams[1]) as client,
    ):
        await client.initialize()
        yield client


# --- several hosts behind one balancer -------------------------------------------------------------------------------

BALANCER = """
    upstream hosts {{ server {one}; server {two}; }}
    server {{
        listen 127.0.0.1:{port};
        location /host1/ {{ proxy_pass http://{one}/; }}
        location /host2/ {{ proxy_pass http://{two}/; }}
        location / {{
            proxy_pass http://hosts;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
        }}
    }}
"""


@pytest.fixture
def balanced(tmp_path: Path) -> Iterator[int]:
    """The port of an nginx that gives each connection to the next of two hosts."""
    hosts = [
        RunningHost(tmp_path / f"host{number}", arguments=["--public-path", f"/host{number}"]).start()
        for number in (1, 2)
    ]
    port = free_port()
    one, two = (host.address for host in hosts)
    try:
        with nginx(tmp_path, BALANCER.format(port=port, one=one, two=two)):
            yield port
    finally:
        for host in hosts:
            host.purge()


async def test_posts_reach_the_host_that_has_the_stream(balanced: int) -> None:
    prefixes = set()
    for number in range(4):
        async with await Stream.open(balanced, "/python/sse", [("x-session-id", f"balanced-{number}")]) as stream:
            prefixes.add(stream.endpoint.split("/")[1])
            await stream.initialize()
            assert await stream.python("6 * 7") == "42"
    assert prefixes == {"host1", "host2"}
