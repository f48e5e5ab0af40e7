"""`toolhost call` against a real host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.host import RunningHost, free_port

pytestmark = pytest.mark.timeout(180)


def call(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolhost", "call", *arguments]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_two_calls_of_one_session_share_a_variable(host: RunningHost) -> None:
    assert call("--url", host.address, "--session", "a", "x = 41").returncode == 0
    assert call("--url", host.address, "--session", "a", "x + 1").stdout == "42\n"
    assert "NameError" in call("--url", host.address, "--session", "b", "x").stdout


def test_the_host_is_found_as_the_commands_for_operators_find_it(host: RunningHost) -> None:
    assert call("6 * 7", TOOLHOST_CLIENT__URL=host.url).stdout == "42\n"
    assert call("6 * 7", TOOLHOST_SERVER__LISTEN=host.address).stdout == "42\n"
    elsewhere = call("1", TOOLHOST_CLIENT__URL="ftp://host")
    assert (elsewhere.returncode, "client.url" in elsewhere.stderr) == (2, True), elsewhere.stderr


def test_standard_input_and_tools_that_are_not_there(host: RunningHost) -> None:
    assert call("--url", host.address, "-", stdin="print('piped')").stdout.strip() == "piped"
    missing = call("--url", host.address, "--tool", "python.nothing", "{}")
    assert missing.returncode == 1
    assert "nothing" in missing.stdout
    namespace = call("--url", host.address, "--tool", "nowhere.exec", "{}")
    assert namespace.returncode == 2
    assert "404" in namespace.stderr
    assert "/python/sse" in namespace.stderr, "the host's own words"
    assert len(namespace.stderr.splitlines()) == 1


def test_a_host_that_is_not_there_is_one_line_that_says_what_to_type() -> None:
    refused = call("--url", f"127.0.0.1:{free_port()}", "1")
    assert refused.returncode == 2
    assert "toolhost serve" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--session", "ü", "1"], "--session"),
        (["--session", "", "1"], "--session"),
        (["--url", "ftp://host:1", "1"], "--url"),
        (["--url", "http://:8000", "1"], "--url"),
        (["--url", "host:port", "1"], "--url"),
        (["--url", "ü:8000", "1"], "--url"),
        (["--url", "https://127.0.0.1:1", "1"], "https://127.0.0.1:1/python/sse"),
        (["\udcff"], "UTF-8"),
        (["--tool", "\udcff.python", "1"], "UTF-8"),
        (["--tool", "container.exec", '{"cmd": "\\ud800"}'], "surrogate"),
        (["--tool", "container.exec", "[" * 100_000], "not JSON"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_one_line(arguments: list[str], word: str) -> None:
    refused = call(*arguments)
    assert refused.returncode == 2
    assert word in refused.stderr
    assert len(refused.stderr.splitlines()) == 1, refused.stderr


def test_a_token_file_that_holds_no_token_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"a\nb", b"\xff", "ü".encode()):
        file = tmp_path / "token"
        file.write_bytes(content)
        refused = call("--token-file", str(file), "1")
        assert refused.returncode == 2
        assert "must hold a token" in refused.stderr
