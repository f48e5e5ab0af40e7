"""`toolhost serve` as a process: what it prints, how it refuses, how it stops."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.toolhost.rawclient import Stream
from tests.toolhost.standin import StandInManager
from toolhost.cli.serve import announce, listening
from toolhost.config import load
from toolhost.errors import ConfigurationError
from toolhost.services import StateDirectoryTaken, build, only_host

ROOT = Path(__file__).parents[2]
QUIET_S = 6.0  # httpx gives a connection up after 5 (httpx.Limits.keepalive_expiry)


@asynccontextmanager
async def process(*command: str, **environment: str) -> AsyncIterator[Process]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command),
        stdout=PIPE,
        stderr=PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def announced(child: Process) -> tuple[int, str]:
    """The port and the text of the start."""
    assert child.stdout is not None
    text = ""
    async with asyncio.timeout(30):
        while "healthz" not in text:
            line = (await child.stdout.readline()).decode()
            assert line, "the host ended before it listened"
            text += line
    match = re.search(r"listens on \S+:(\d+)", text)
    assert match
    return int(match[1]), text


async def ended(child: Process) -> tuple[int | None, str]:
    assert child.stderr is not None
    async with asyncio.timeout(30):
        error = (await child.stderr.read()).decode()
        return await child.wait(), error


async def test_it_prints_the_flag_for_vllm_and_something_to_try() -> None:
    async with process("tests.toolhost.serve_standin") as child:
        port, text = await announced(child)
        assert f"--tool-server 127.0.0.1:{port}/python" in text
        assert "code_interpreter" in text


@pytest.mark.parametrize(("port", "of_vllm"), [(8000, 8001), (8100, 8000)])
def test_the_printed_commands_do_not_send_the_model_s_requests_to_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], port: int, of_vllm: int
) -> None:
    class Listener(socket.socket):
        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", port

    services = build(load(flags={"state_dir": str(tmp_path)}), StandInManager())
    with Listener() as listener:
        announce(services, listener)
    text = capsys.readouterr().out
    assert f"http://localhost:{of_vllm}/v1/responses" in text
    assert ("vllm serve openai/gpt-oss-20b --port 8001 " in text) is (of_vllm == 8001)
    assert f"--tool-server 127.0.0.1:{port}/python" in text


async def test_a_client_that_keeps_connections_as_long_as_httpx_does_is_never_closed_on_first() -> None:
    async with process("tests.toolhost.serve_standin") as child:
        port, _ = await announced(child)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for pause_s in (0, QUIET_S):
            await asyncio.sleep(pause_s)
            writer.write(f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = re.search(rb"content-length: (\d+)", head)
            assert length
            await reader.readexactly(int(length[1]))
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_in_order_with_a_stream_open_and_a_call_running(number: signal.Signals) -> None:
    async with process("tests.toolhost.serve_standin") as child:
        port, _ = await announced(child)
        async with await Stream.open(port) as stream:
            await stream.initialize()
            await stream.send("tools/call", {"name": "python", "arguments": {"code": "wait"}})
            child.send_signal(number)
            await stream.ended()
        code, error = await ended(child)
        assert code == 0
        assert "Traceback" not in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("broken", ["stderr", "stdout", "both"])
async def test_a_signal_ends_a_host_whose_output_nobody_reads_any_more(number: signal.Signals, broken: str) -> None:
    ends, readers = {}, []
    for name in ("stdout", "stderr"):
        reading, ends[name] = os.pipe()
        if broken in (name, "both"):
            os.close(reading)
        else:
            readers.append(reading)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.toolhost.serve_standin", "--port", str(port)),
        stdout=ends["stdout"],
        stderr=ends["stderr"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TOOLHOST_LOG__LEVEL": "debug"},
    )
    for end in ends.values():
        os.close(end)
    try:
        async with asyncio.timeout(30):
            while not await _answers(port):
                assert child.returncode is None
            child.send_signal(number)
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        for reading in readers:
            os.close(reading)


async def _answers(port: int) -> bool:
    """Whether the host takes a connection and a call over it, which it logs."""
    try:
        async with await Stream.open(port) as stream:
            await stream.initialize()
            return await stream.python("1") == "1"
    except ConnectionRefusedError:
        await asyncio.sleep(0.05)
        return False


async def test_a_stop_that_hangs_is_bounded() -> None:
    async with process("tests.toolhost.serve_standin", "--hang") as child:
        await announced(child)
        child.terminate()
        code, error = await ended(child)
        assert "did not end in time" in error
        assert code == 0


async def test_a_second_signal_ends_it_at_once() -> None:
    async with process("tests.toolhost.serve_standin", "--hang", "60") as child:
        await announced(child)
        child.send_signal(signal.SIGINT)
        assert child.stderr is not None
        assert b"again" in await child.stderr.readline()
        async with asyncio.timeout(30):
            while child.returncode is None:  # one that comes too soon counts as the same
                child.send_signal(signal.SIGINT)
                await asyncio.wait((asyncio.ensure_future(child.wait()),), timeout=0.2)
        assert child.returncode == 130


async def refused(*arguments: str, **environment: str) -> str:
    async with process("toolhost", "serve", *arguments, **environment) as child:
        code, error = await ended(child)
        assert code == 2
        assert error.startswith("toolhost: ")
        assert error.count("\n") == 1, error
        return error


async def test_a_port_in_use_is_named_with_another_one_to_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = await refused("--listen", f"127.0.0.1:{port}")
    assert "in use" in error
    assert f"--listen 127.0.0.1:{port + 1}" in error


def test_a_search_client_that_is_missing_is_noticed_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolhost.search.auto.find_spec", lambda name: None)
    settings = load(flags={"state_dir": str(tmp_path), "search": {"exa_api_key": "k"}})
    notices = build(settings, StandInManager()).notices()
    assert any("search by exa is configured, and its client is missing" in notice for notice in notices)


async def test_a_second_host_on_one_state_directory_is_refused(tmp_path: Path) -> None:
    with only_host(tmp_path):
        assert (tmp_path / "lock").stat().st_mode & 0o077 == 0
        error = await refused("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
    assert "another host runs" in error
    assert "--state-dir" in error


def test_a_state_directory_that_cannot_be_used_is_not_taken_for_another_hosts() -> None:
    with pytest.raises(ConfigurationError, match="/proc/self cannot be used") as caught, only_host(Path("/proc/self")):
        pass
    assert not isinstance(caught.value, StateDirectoryTaken)


async def test_settings_that_cannot_be_used_are_named_with_their_place(tmp_path: Path) -> None:
    assert "cannot read settings file" in await refused("--config", str(tmp_path / "missing.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[server\n")
    assert "not valid TOML" in await refused("--config", str(broken))
    assert "HOST:PORT" in await refused("--listen", "nowhere")
    assert "TOOLHOST_SERVR" in await refused(TOOLHOST_SERVR__LISTEN="x")


@pytest.mark.parametrize(("listen", "connect"), [("[::1]:0", "::1"), ("[::]:0", "127.0.0.1"), ("localhost:0", None)])
def test_it_listens_where_it_is_told(listen: str, connect: str | None) -> None:
    with listening(load(flags={"server": {"listen": listen}})) as listener:
        host, port = listener.getsockname()[:2]
        socket.create_connection((connect or host, port), timeout=5).close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="an address of this machine"):
        listening(load(flags={"server": {"listen": "192.0.2.1:0"}}))


async def test_an_open_bind_without_tokens_is_refused_with_what_to_give() -> None:
    error = await refused("--listen", "0.0.0.0:0")
    assert "--tokens-file" in error
    assert "--insecure" in error
