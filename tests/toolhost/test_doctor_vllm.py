"""`toolhost doctor --client vllm` names what would keep a vLLM from using this host, and what to type."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.toolhost.conftest import Host, StartHost
from toolhost.cli import doctor_vllm
from toolhost.cli.doctor import Client, examine
from toolhost.cli.findings import Finding
from toolhost.config import load
from toolhost.namespaces.registry import NAMESPACES


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS", raising=False)


def found(name: str | None = None, **flags: object) -> Mapping[str, Finding]:
    settings = load(flags=flags)
    return {finding.check: finding for finding in doctor_vllm.check_vllm(settings, name)}


def running(host: Host) -> dict[str, object]:
    return {"listen": f"127.0.0.1:{host.port}"}


async def test_a_host_header_that_is_refused_is_wrong_with_the_option_that_takes_it(host: Host) -> None:

    refused = (await asyncio.to_thread(found, "toolhost", server=running(host)))["host"]
    assert refused.grade == "wrong" and "--allowed-host toolhost" in refused.mend
    assert (await asyncio.to_thread(found, "localhost", server=running(host)))["host"].grade == "ok"


async def test_an_allowed_name_is_ok(start_host: StartHost) -> None:

    host = await start_host(server={"allowed_hosts": ["toolhost"]})
    assert (await asyncio.to_thread(found, "toolhost", server=running(host)))["host"].grade == "ok"


def test_no_host_is_told() -> None:
    assert "start it first" in found(server={"listen": "127.0.0.1:9"})["host"].mend


def test_a_loopback_bind_is_weak_for_a_client_elsewhere() -> None:
    assert "0.0.0.0" in found()["reach"].mend
    open_bind = {"server": {"listen": "0.0.0.0:9"}, "auth": {"insecure": True}}
    assert "reach" not in found(**open_bind)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_that_applies_to_the_host_s_name_is_wrong(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    proxy = found("toolhost")["client proxy"]
    assert proxy.grade == "wrong" and variable in proxy.what and "toolhost" in proxy.mend
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1,toolhost")
    assert "client proxy" not in found("toolhost")


@pytest.mark.parametrize(
    ("vllm", "mcp", "grade"),
    [
        ("0.12.0", "2.3.0", "ok"),
        ("0.13.0", "2.0.0", "wrong"),
        ("0.29.1+cpu", "2.3.0", "wrong"),
        ("0.29.1", "1.28.0", "ok"),
        ("0.30.0", "2.3.0", "ok"),
        ("0.32.0", "", "wrong"),
    ],
)
def test_versions_that_do_not_start_together_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: str, mcp: str, grade: str
) -> None:
    installed(tmp_path, monkeypatch, vllm, mcp)
    versions = found()["vllm"]
    assert versions.grade == grade and vllm in versions.what
    if grade == "wrong":
        assert "mcp" in versions.mend


def installed(directory: Path, monkeypatch: pytest.MonkeyPatch, vllm: str, mcp: str) -> None:
    """A `vllm` command whose interpreter answers these versions."""
    python = directory / "python"
    answers = shlex.quote(f"{vllm}\n{mcp}\n")
    python.write_text(f"#!/bin/sh\nprintf %s {answers}\n")
    command = directory / "vllm"
    command.write_text(f"#!{python}\n")
    for program in (python, command):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_a_vllm_that_is_not_there_or_not_python_is_weak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found()["vllm"].grade == "weak"
    command = tmp_path / "vllm"
    command.write_bytes(b"\x7fELF\xff\xfe")
    command.chmod(0o755)
    assert "cannot tell" in found()["vllm"].what


def test_a_real_interpreter_answers_its_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "vllm"
    command.write_text(f"#!{sys.executable}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found()["vllm"].grade == "weak", "there is no vllm in this interpreter"


def test_a_label_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "container" in found()["labels"].what
    monkeypatch.setenv("VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS", "container,code_interpreter")
    assert found()["labels"].grade == "ok"


def test_the_request_to_try_enables_every_namespace() -> None:
    command = shlex.split(doctor_vllm.request_to_try())
    tools = json.loads(command[-1])["tools"]
    assert {"type": "code_interpreter", "container": {"type": "auto"}} in tools
    assert {"type": "mcp", "server_label": "container"} in tools
    assert len(tools) == len(NAMESPACES)
    started = doctor_vllm.vllm_command(load(flags={"server": {"listen": "[::1]:8000", "root_path": "/a"}}), None)
    assert all(f"[::1]:8000/a/{namespace}" in started for namespace in NAMESPACES)


def test_every_namespace_is_one_that_vllm_dispatches() -> None:
    assert NAMESPACES.keys() <= {"python", "browser", "container"}


def test_the_checks_come_after_the_machine_s_own(tmp_path: Path) -> None:
    checks = [finding.check for finding in examine(None, {"state_dir": tmp_path}, client=Client.VLLM)]
    assert checks.index("port") < checks.index("labels")
