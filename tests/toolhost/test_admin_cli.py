"""`toolhost sessions` against a host on loopback: what it prints where, its exit codes, what it says when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sandboxes.spec import Retention
from tests.support.host import free_port
from tests.toolhost.managed import ManagedHost, digest_of, managed, tokens_file
from toolhost.admin_client import AdminClient, HostRefused, HostUnreachable
from toolhost.auth import Scope
from toolhost.cli.sessions import app
from toolhost.cli.shown import duration, safe, size, span

SECRET = "Zq3xK9vT7mW1pR5nL8cY2bH6"


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[ManagedHost]:
    async with managed(tmp_path) as running:
        yield running


async def sessions(host: ManagedHost | str, *arguments: str, env: dict[str, str] | None = None) -> Result:
    """The command in a thread: the host is served by this one."""
    url = host if isinstance(host, str) else host.url
    variables = {"TOOLHOST_CLIENT__URL": url, **(env or {})}
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=variables)


async def test_in_a_pipe_the_list_is_one_line_a_session_with_tabs_and_plain_numbers(host: ManagedHost) -> None:
    await host.run("a")
    await host.run("b", "1 / 0")
    done = await sessions(host, "list")
    assert done.exit_code == 0, done.output
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert sorted(row[0] for row in rows) == ["anonymous/request/a", "anonymous/request/b"]
    row = next(row for row in rows if row[0].endswith("/b"))
    assert (row[1], row[2], row[4], row[6], row[9]) == (digest_of("b"), "idle", "1", str(1 << 20), "raised")
    assert float(row[7]) >= 0
    as_json = await sessions(host, "list", "--json", "--principal", "anonymous", "--idle", "1d")
    assert json.loads(as_json.stdout) == []


async def test_a_session_is_named_as_the_list_shows_it_by_digest_or_by_a_unique_id(host: ManagedHost) -> None:
    await host.run("a")
    await host.run(SECRET, retention=Retention.RETAINED)
    masked = f"anonymous/retained/#{digest_of(SECRET, retention=Retention.RETAINED)[:12]}"
    for name in ("a", "anonymous/request/a", digest_of("a"), digest_of("a")[:8]):
        done = await sessions(host, "show", name, "--json")
        assert json.loads(done.stdout)["name"] == "anonymous/request/a", done.output
    done = await sessions(host, "show", masked)
    assert done.exit_code == 0
    assert SECRET not in done.output
    assert f"session\t{masked}" in done.stdout
    await host.run("a", principal="bob")
    done = await sessions(host, "show", "a")
    assert (done.exit_code, "2 open sessions have the id a" in done.stderr) == (1, True)


async def test_receipts_are_lines_oldest_first_and_cannot_command_a_terminal(host: ManagedHost) -> None:
    await host.run("a", "1", attempt="first")
    await host.run("a", "1 / 0", attempt="red\x1b[31m\ttab")
    done = await sessions(host, "logs", "a")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [(line[0], line[4]) for line in lines] == [("first", "ok"), (r"red\x1b[31m\ttab", "raised")]
    assert "\x1b" not in done.stdout


async def test_a_new_key_is_all_that_is_printed_and_it_works(host: ManagedHost) -> None:
    done = await sessions(host, "new", "--ttl", "10m")
    key = done.stdout.strip()
    async with await host.connect(None, headers=[("x-toolhost-session", key)]) as stream:
        assert await stream.python("6 * 7") == "42"


async def test_closing_ends_named_ones_or_all_that_match_and_says_when_there_was_nothing(host: ManagedHost) -> None:
    for name in ("a", "b", "c"):
        await host.run(name)
    await host.run("d", principal="bob")
    done = await sessions(host, "close", "a", "nowhere")
    assert (done.exit_code, len(host.engine.sandboxes)) == (1, 4), "a wrong name closes nothing"
    done = await sessions(host, "close", "a")
    assert (done.exit_code, done.stdout.strip(), len(host.engine.sandboxes)) == (0, "a", 3)
    done = await sessions(host, "close", "--principal", "anonymous")
    assert (done.exit_code, len(host.engine.sandboxes)) == (2, 3), "nobody can be asked in a pipe"
    assert "--yes" in done.stderr
    done = await sessions(host, "close", "--principal", "anonymous", "--yes")
    assert done.exit_code == 0
    assert sorted(done.stdout.split()) == ["anonymous/request/b", "anonymous/request/c"]
    done = await sessions(host, "close", "--idle", "10m", "--yes")
    assert (done.exit_code, len(host.engine.sandboxes)) == (1, 1)
    for wrong in (("close",), ("close", "a", "--all"), ("close", "--idle", "soon")):
        assert (await sessions(host, *wrong)).exit_code == 2


async def test_interrupt_and_restart_reach_the_session(host: ManagedHost) -> None:
    await host.run("a", "x = 1")
    done = await sessions(host, "interrupt", "a")
    assert (done.exit_code, "nothing runs" in done.stderr) == (1, True)
    assert (await sessions(host, "restart", "a")).exit_code == 2, "nobody can be asked in a pipe"
    done = await sessions(host, "restart", "a", "--yes")
    assert (done.exit_code, done.stdout.strip()) == (0, "2")


async def test_files_are_copied_in_and_out_and_none_is_overwritten_by_accident(
    host: ManagedHost, tmp_path: Path
) -> None:
    await host.run("a")
    source, target = tmp_path / "in.bin", tmp_path / "out.bin"
    source.write_bytes(os.urandom(700_000))
    assert (await sessions(host, "files", "put", "a", str(source), "dir/in.bin")).exit_code == 0
    done = await sessions(host, "files", "list", "a")
    assert done.stdout.split("\t")[:3] == ["dir/in.bin", "file", "700000"]
    assert (await sessions(host, "files", "get", "a", "dir/in.bin", str(target))).exit_code == 0
    assert target.read_bytes() == source.read_bytes()
    done = await sessions(host, "files", "get", "a", "dir/in.bin", str(target))
    assert (done.exit_code, "--force" in done.stderr) == (2, True)
    done = await sessions(host, "files", "get", "a", "nowhere", str(tmp_path / "none"))
    assert done.exit_code == 1
    assert await asyncio.to_thread(lambda: list(tmp_path.glob(".*.part"))) == [], "nothing half copied is left"


async def test_a_list_of_files_that_is_cut_says_so_beside_what_is_piped(host: ManagedHost) -> None:
    await host.run("a")
    (files,) = host.engine.workspaces.values()
    files.update({f"{number:04}": b"" for number in range(5001)})
    done = await sessions(host, "files", "list", "a")
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 5000)
    assert done.stderr == "Only the first 5000 entries are listed: there are more. Name a directory.\n"
    files.clear()
    assert (await sessions(host, "files", "list", "a", "--json")).stderr == ""


async def test_a_filter_that_the_host_does_not_know_is_wrong_usage(host: ManagedHost) -> None:
    for arguments in (("--state", "bogus"), ("--kind", "bogus"), ("--idle", "10x")):
        done = await sessions(host, "list", *arguments)
        assert done.exit_code == 2, done.output


async def test_where_no_host_is_it_says_what_to_type(tmp_path: Path) -> None:
    done = await sessions(f"http://127.0.0.1:{free_port()}", "list")
    assert done.exit_code == 3
    assert "--url" in done.stderr
    assert "toolhost sessions prune" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (await sessions("ftp://nowhere", "list")).exit_code == 2


async def test_what_is_no_tool_host_is_told_apart(host: ManagedHost) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        done = await sessions(f"http://127.0.0.1:{port}", "list")
    assert (done.exit_code, "not a tool host" in done.stderr) == (3, True)


async def test_tokens_come_from_a_file_or_the_environment_and_the_scope_is_told(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path / "tokens", alice=(Scope.USE,), root=(Scope.USE, Scope.ADMIN))
    (tmp_path / "root").write_text(f"{tokens['root']}\n")
    async with managed(tmp_path, tokens=tokens) as host:
        done = await sessions(host, "list")
        assert (done.exit_code, "--token-file" in done.stderr) == (4, True)
        done = await sessions(host, "list", env={"TOOLHOST_CLIENT__TOKEN": tokens["alice"]})
        assert (done.exit_code, "`admin`" in done.stderr) == (4, True)
        assert (await sessions(host, "list", env={"TOOLHOST_CLIENT__TOKEN": tokens["root"]})).exit_code == 0
        assert (await sessions(host, "list", "--token-file", str(tmp_path / "root"))).exit_code == 0
        done = await sessions(host, "new", env={"TOOLHOST_CLIENT__TOKEN": tokens["alice"]})
        assert done.exit_code == 0, "who may use it may mint a key of their own"
        assert (await sessions(host, "list", "--token-file", str(tmp_path / "none"))).exit_code == 2
    assert not any(name in " ".join(sys.argv) for name in tokens.values())


def test_no_command_takes_a_token_on_its_command_line() -> None:
    shown = CliRunner().invoke(app, ["list", "--help"]).stdout
    assert "--token-file" in shown
    assert "--token " not in shown


async def test_an_upload_that_is_refused_early_says_why(tmp_path: Path) -> None:
    async with managed(tmp_path, server={"max_file_bytes": 1000}) as host:
        await host.run("a")
        source = tmp_path / "big"
        source.write_bytes(b"x" * 5_000_000)
        done = await sessions(host, "files", "put", "a", str(source))
    assert (done.exit_code, "1000 bytes" in done.stderr) == (4, True)


def test_the_client_tells_no_host_from_a_wrong_name() -> None:
    client = AdminClient("http://127.0.0.1:1")
    with pytest.raises(HostUnreachable, match="nothing listens"):
        client.sessions()
    with pytest.raises(HostRefused, match="PRINCIPAL/KIND/ID"):
        client.digest("a/b")


def test_durations_and_sizes_are_read_and_shown_for_people() -> None:
    assert [duration(text) for text in ("90", "30s", "10m", "1.5h", "2d")] == [90, 30, 600, 5400, 172800]
    assert [size(value) for value in (None, 0, 1023, 1 << 20, 3 << 30, 5 << 40)] == [
        *(None, "0 B", "1023 B", "1.0 MiB", "3.0 GiB", "5120.0 GiB")
    ]
    assert [span(value) for value in (0.004, 5, 65, 3700, 200_000)] == ["4 ms", "5 s", "1 m 5 s", "1 h 1 m", "2 d 7 h"]
    assert safe("a\nb\x1b\u202e\udc80é") == r"a\nb\x1b\u202e\udc80é"


async def test_on_a_terminal_the_list_is_a_table_that_can_be_watched_until_ctrl_c(host: ManagedHost) -> None:
    await host.run("a", "1 / 0")
    shown = await asyncio.to_thread(_on_a_terminal, host.url, "list")
    assert "SESSION" in shown.text
    assert "anonymous/request/a" in shown.text
    assert "1.0 MiB" in shown.text
    assert shown.code == 0
    watched = await asyncio.to_thread(_on_a_terminal, host.url, "list", "--watch", "--every", "0.2", until=b"0 %")
    assert "anonymous/request/a" in watched.text
    assert watched.code == 130
    assert "Traceback" not in watched.text


@dataclass(frozen=True)
class Shown:
    text: str
    code: int


def _on_a_terminal(url: str, *arguments: str, until: bytes | None = None) -> Shown:
    """Runs the command on a terminal of its own; with `until`, presses Ctrl-C once that is shown."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 160))
    process = subprocess.Popen(
        [sys.executable, "-m", "toolhost", "sessions", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TOOLHOST_CLIENT__URL": url, "TERM": "xterm", "COLUMNS": "160"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the other end was closed: it has ended
        while piece := os.read(ours, 1 << 16):
            said += piece
            if until is not None and until in said:
                os.write(ours, b"\x03")
                until = None
    os.close(ours)
    return Shown(said.decode(errors="replace"), process.wait(timeout=30))
