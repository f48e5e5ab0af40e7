"""`toolhost call` against a real host."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.host import RunningHost, free_port

pytestmark = pytest.mark.timeout(180)


def call(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolhost", "call", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_two_calls_of_one_session_share_a_variable(host: RunningHost) -> None:
    assert call("--url", host.address, "--session", "a", "x = 41").returncode == 0
    assert call("--url", host.address, "--session", "a", "x + 1").stdout == "42\n"
    assert "NameError" in call("--url", host.address, "--session", "b", "x").stdout


def test_standard_input_and_tools_that_are_not_there(host: RunningHost) -> None:
    assert call("--url", host.address, "-", stdin="print('piped')").stdout.strip() == "piped"
    missing = call("--url", host.address, "--tool", "python.nothing", "{}")
    assert missing.returncode == 1
    assert "nothing" in missing.stdout
    namespace = call("--url", host.address, "--tool", "nowhere.exec", "{}")
    assert namespace.returncode == 2
    assert "404" in namespace.stderr


def test_a_host_that_is_not_there_is_one_line_that_says_what_to_type() -> None:
    refused = call("--url", f"127.0.0.1:{free_port()}", "1")
    assert refused.returncode == 2
    assert "toolhost serve" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
