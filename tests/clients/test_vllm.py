"""vLLM's own MCPToolServer and HarmonyContext, without an engine."""

from __future__ import annotations

import json

import pytest

from tests.clients.drive import drive
from tests.clients.environments import ENVIRONMENTS
from tests.support.host import RunningHost

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


def drive_vllm(tool_server: str, script: list[dict[str, object]]) -> dict[str, object]:
    vocabulary = ENVIRONMENTS["vllm"].directory / "vocabulary"
    report: dict[str, object] = drive(
        "vllm",
        "vllm_harmony.py",
        tool_server,
        json.dumps(script),
        environment={"TIKTOKEN_ENCODINGS_BASE": str(vocabulary), "VLLM_LOGGING_LEVEL": "WARNING"},
    )
    return report


@pytest.mark.parametrize("path", ["", "/python"])
def test_harmony_context_runs_three_turns_that_share_state(host: RunningHost, path: str) -> None:
    turns = [["python", "x = 40"], ["python", "x += 2"], ["python", "print(x)"]]
    report = drive_vllm(host.address + path, [{"calls": turns}, {"calls": [["python", "x"]]}])
    assert report["namespaces"] == ["python"]
    one, two = report["responses"]  # type: ignore[misc]
    assert one[2].strip() == "42"
    assert "NameError" in two[0], "another response is another session"


def test_hidden_tools_are_not_in_the_prompt(host: RunningHost) -> None:
    prompt = drive_vllm(host.address, [])["prompt"]
    assert isinstance(prompt, str)
    assert "cleanup_session" not in prompt
    assert "## python" in prompt
    assert "type python" not in prompt


def test_a_retained_key_keeps_state_across_responses(host: RunningHost) -> None:
    headers = {"x-toolhost-session": "kept-0123456789abcdefghijklmn"}
    script: list[dict[str, object]] = [
        {"calls": [["python", "kept = 7"]], "headers": headers},
        {"calls": [["python", "kept"]], "headers": headers},
    ]
    _, two = drive_vllm(f"{host.address}/python", script)["responses"]  # type: ignore[misc]
    assert two == ["7"]


def test_code_that_raises_does_not_fail_the_response(host: RunningHost) -> None:
    report = drive_vllm(host.address, [{"calls": [["python", "1/0"], ["python", ""], ["python", '{"code": "6*7"}']]}])
    (texts,) = report["responses"]  # type: ignore[misc]
    assert "ZeroDivisionError" in texts[0]
    assert texts[1].strip()
    assert texts[2] == "42"
