"""Independent hosts behind HAProxy, by the recipe of docs/cluster.md: sessions come back, and what a loss costs."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from tests.support.host import RunningHost, free_port
from tests.support.waiting import until
from tests.toolhost.rawclient import Stream, request

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(180)]

RECIPE = Path(__file__).parents[2] / "docs" / "examples" / "haproxy.cfg"
KEYS = [f"resp_{number:032x}" for number in range(12)]


@contextmanager
def haproxy(directory: Path, hosts: list[RunningHost]) -> Iterator[int]:
    """The recipe, with these hosts' addresses and another port: nothing else of it is changed."""
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("no haproxy (apt-get install haproxy)")
    port = free_port()
    text = RECIPE.read_text().replace("bind :8000", f"bind 127.0.0.1:{port}")
    for number, host in enumerate(hosts, start=1):
        assert f"10.0.0.{number}:8000" in text
        text = text.replace(f"10.0.0.{number}:8000", host.address)
    file = directory / "haproxy.cfg"
    file.write_text(text)
    checked = subprocess.run([program, "-c", "-f", str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "[WARNING]" not in checked.stderr, checked.stderr
    with (directory / "haproxy.log").open("ab") as log:
        process = subprocess.Popen([program, "-db", "-f", str(file)], stdout=log, stderr=log)
    try:
        yield port
        assert process.poll() is None, (directory / "haproxy.log").read_text()
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningHost]]:
    settings = {"TOOLHOST_SANDBOX__MEMORY_BYTES": str(256 << 20), "TOOLHOST_SERVER__PING_S": "2"}
    directory = tmp_path_factory.mktemp("independent")
    made = [
        RunningHost(directory / f"h{number}", arguments=["--public-path", f"/h{number}"], environment=settings).start()
        for number in (1, 2)
    ]
    yield made
    for host in made:
        host.purge()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, hosts: list[RunningHost]) -> Iterator[int]:
    with haproxy(tmp_path_factory.mktemp("haproxy"), hosts) as port:
        asyncio.run(until(lambda: answers(port), "HAProxy does not answer"))
        yield port


async def answers(port: int) -> bool:
    try:
        return (await request(port, "/livez")).status == 200
    except (OSError, EOFError, ValueError):
        return False


async def ask(port: int, session: str, code: str, header: str = "x-session-id") -> tuple[str, str]:
    """The prefix of the host that answered, and what the code said. A connection of its own."""
    async with await Stream.open(port, "/python/sse", [(header, session)]) as stream:
        assert stream.status == 200
        await stream.initialize()
        return stream.endpoint.split("/")[1], await stream.python(code)


async def test_a_session_comes_back_to_its_host(port: int) -> None:
    first = dict(zip(KEYS, await asyncio.gather(*(ask(port, key, f"x = '{key}'; x") for key in KEYS)), strict=True))
    assert {prefix for prefix, _ in first.values()} == {"h1", "h2"}, "both have some"
    for key in KEYS:
        assert await ask(port, key, "x") == (first[key][0], f"'{key}'")


async def test_a_retained_name_is_taken_before_the_response_and_so_is_the_url(port: int) -> None:
    name = "kept-by-the-test-000001"
    where, _ = await ask(port, name, "x = 41", header="x-toolhost-session")
    for key in KEYS[:4]:
        headers = [("x-toolhost-session", name), ("x-session-id", key)]
        async with await Stream.open(port, "/python/sse", headers) as stream:
            await stream.initialize()
            assert (stream.endpoint.split("/")[1], await stream.python("x + 1")) == (where, "42")
    for path in (f"/s/{name}/python/sse", f"/s/{name}/sse"):
        async with await Stream.open(port, path, []) as stream:
            await stream.initialize()
            assert (stream.endpoint.split("/")[1], await stream.python("x + 1")) == (where, "42")


async def test_a_sessions_files_are_at_its_host(port: int) -> None:
    for key in KEYS[:6]:
        await ask(port, key, f"open('name', 'w').write('{key}')")
        for path in (f"/v1/sessions/{key}/files/name", f"/v1/sessions/request/{key}/files/name"):
            assert (await request(port, path)).body == key.encode()


async def test_clients_without_a_name_post_to_the_host_of_their_stream(port: int) -> None:
    seen = set()
    for number in range(6):
        async with await Stream.open(port, "/python/sse", []) as stream:
            await stream.initialize()
            seen.add(stream.endpoint.split("/")[1])
            await stream.python(f"x = {number}")
            assert await stream.python("x") == str(number)
    assert seen == {"h1", "h2"}


async def test_streamable_http_without_a_name_stays_with_its_host(port: int) -> None:
    for number in range(4):
        async with (
            httpx2.AsyncClient(timeout=60) as http,
            streamable_http_client(f"http://127.0.0.1:{port}/python/mcp", http_client=http) as streams,
            ClientSession(streams[0], streams[1]) as client,
        ):
            await client.initialize()
            await client.call_tool("python", {"code": f"x = {number}"})
            for _ in range(3):
                result = await client.call_tool("python", {"code": "x"})
                assert result.content[0].model_dump()["text"] == str(number)


async def test_output_is_not_gathered(port: int) -> None:
    """A ping, a few bytes, arrives while nothing else is sent."""
    async with await Stream.open(port, "/python/sse", [("x-session-id", KEYS[0])]) as stream:
        assert (await stream.comment()).startswith(b":")


async def test_a_lost_host_loses_its_sessions_and_no_other(port: int, hosts: list[RunningHost]) -> None:
    where = {key: (await ask(port, key, f"x = '{key}'"))[0] for key in KEYS}
    await asyncio.to_thread(hosts[1].kill)
    lost = next(key for key in KEYS if where[key] == "h2")

    async def moved() -> bool:
        try:
            return (await ask(port, lost, "1"))[0] == "h1"
        except (OSError, EOFError, AssertionError, ValueError):
            return False

    await until(moved, "the balancer did not notice")
    for key in KEYS:
        prefix, text = await ask(port, key, "x")
        assert prefix == "h1"
        assert text == f"'{key}'" if where[key] == "h1" else "NameError" in text
    await asyncio.to_thread(hosts[1].start)

    async def returned() -> bool:
        return (await ask(port, lost, "1"))[0] == "h2"

    await until(returned, "the host is not used again")
    assert (await ask(port, lost, "x")) == ("h2", f"'{lost}'"), "as the recipe says: what it had before"
