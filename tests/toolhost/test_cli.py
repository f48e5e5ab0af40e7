"""The commands that need no host."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tests.toolhost.gateway import redis_server
from toolhost import __version__
from toolhost.auth import Authenticator
from toolhost.cli import COMMANDS
from toolhost.cli.doctor import Finding, examine
from toolhost.config import SandboxSettings, load

HEAVY = ("mcp", "uvicorn", "starlette", "pydantic", "docker")


def toolhost(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "toolhost", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_help_lists_every_command_and_loads_none_of_them() -> None:
    code = f"""
import sys
from toolhost.cli import main
try:
    main()
finally:
    print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert all(name in done.stdout for name in COMMANDS)
    assert "LOADED []" in done.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    done = toolhost(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_the_help_of_serve_names_every_backend() -> None:
    names = get_args(SandboxSettings.model_fields["backend"].annotation)
    assert set(names) <= set(re.findall(r"[a-z]+", toolhost("serve", "--help").stdout.partition("--backend")[2][:300]))


@pytest.mark.parametrize(
    "command",
    [
        ("serve",),
        ("stdio",),
        ("gateway", "--model-url", "http://127.0.0.1:9/v1"),
        ("sessions", "prune"),
        ("corpus", "list"),
        ("cluster", "status"),
    ],
    ids=lambda command: command[0],
)
def test_an_empty_state_directory_is_refused_and_nothing_is_written(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "toolhost", *command, "--state-dir", ""],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 2
    assert "state_dir (from the command line): is empty" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_told() -> None:
    assert toolhost("--version").stdout == f"toolhost {__version__}\n"


def test_an_unknown_command_is_refused() -> None:
    done = toolhost("serv")
    assert done.returncode == 2
    assert "serv" in done.stderr


def test_a_token_is_minted_into_the_file_and_shown_once(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    done = toolhost("tokens", "new", "alice", "--file", str(file))
    assert done.returncode == 0, done.stderr
    token = done.stdout.strip()
    assert token not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    checked = Authenticator(load(flags={"auth": {"tokens_file": str(file)}}))
    assert checked.authenticate([(b"authorization", f"Bearer {token}".encode())], "").name == "alice"
    assert toolhost("tokens", "new", "a b", "--file", str(file)).returncode == 2
    assert toolhost("tokens", "new", "bob", "--file", str(tmp_path)).returncode == 2


# --- doctor ----------------------------------------------------------------------------------------------------------


def findings(**flags: object) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(None, flags)}


def test_doctor_names_a_missing_environment_and_what_to_type(tmp_path: Path) -> None:
    found = findings(bubblewrap={"environment_dir": str(tmp_path / "none")}, state_dir=str(tmp_path / "state"))
    assert (found["sandbox environment"].grade, found["sandbox environment"].mend) == ("wrong", "toolhost setup")
    assert found["python"].grade == "ok"
    assert not (tmp_path / "state").exists(), "looking makes nothing"


def test_doctor_names_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = findings(server={"listen": f"127.0.0.1:{taken.getsockname()[1]}"}, state_dir=str(tmp_path))
    assert found["port"].grade == "weak"


def test_doctor_names_proxies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert "HTTP_PROXY" in findings(state_dir=str(tmp_path))["proxy"].what
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert "proxy" not in findings(state_dir=str(tmp_path))


def test_doctor_says_when_the_shared_store_cannot_be_reached(tmp_path: Path) -> None:
    assert "store" not in findings(state_dir=str(tmp_path))
    for url, word in (
        ("redis://:secret@127.0.0.1:1/0", "start it"),
        ("http://127.0.0.1:1", "must begin with redis://"),
    ):
        found = findings(state_dir=str(tmp_path), store={"url": url})["store"]
        assert (found.grade, word in found.what, "secret" in found.what) == ("wrong", True, False)
    lone = findings(state_dir=str(tmp_path), store={"url_file": str(tmp_path / "none")})["store"]
    assert (lone.grade, "cannot read" in lone.what) == ("wrong", True)


def test_doctor_finds_a_shared_store_that_answers(tmp_path: Path) -> None:
    if redis_server.PATH is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    server = redis_server.RedisServer(tmp_path)
    try:
        assert findings(state_dir=str(tmp_path), store={"url": server.url})["store"].grade == "ok"
    finally:
        server.stop()


def test_doctor_stops_at_settings_that_cannot_be_read(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in examine(tmp_path / "missing.toml", {})}
    assert found["settings"].grade == "wrong"
    assert "isolation" not in found


def test_doctor_answers_programs_in_json_and_with_its_exit_code(tmp_path: Path) -> None:
    done = toolhost(
        *("doctor", "--json", "--state-dir", str(tmp_path)), TOOLHOST_BUBBLEWRAP__ENVIRONMENT_DIR=str(tmp_path / "none")
    )
    assert done.returncode == 1
    assert {entry["grade"] for entry in json.loads(done.stdout)} >= {"ok", "wrong"}
