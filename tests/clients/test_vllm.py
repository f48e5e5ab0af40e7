"""vLLM's own MCPToolServer and HarmonyContext, without an engine.

Importing vLLM takes long, so one process runs the whole script against each form of address and the tests read of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from tests.clients.drive import drive
from tests.clients.environments import ENVIRONMENTS
from tests.support.host import RunningHost

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

KEPT = {"x-toolhost-session": "kept-0123456789abcdefghijklmn"}
SCRIPT = [
    {"calls": [["python", "x = 40"], ["python", "x += 2"], ["python", "print(x)"]]},
    {"calls": [["python", "x"]]},
    {"calls": [["python", "kept = 7"]], "headers": KEPT},
    {"calls": [["python", "kept"]], "headers": KEPT},
    {"calls": [["python", "1/0"], ["python", ""], ["python", '{"code": "6*7"}']]},
]
CONTAINER_SCRIPT = [
    {
        "calls": [
            ["python", "open('/mnt/data/shared.txt', 'w').write('from python')"],
            ["container.exec", '{"cmd": ["cat", "/mnt/data/shared.txt"]}'],
            ["container.exec", '{"cmd": "cd /tmp && x=41", "session_name": "work"}'],
            ["container.exec", '{"cmd": ["bash", "-lc", "echo $((x + 1)) $PWD"], "session_name": "work"}'],
            ["container.exec", '{"cmd": "[\\"sh\\", \\"-c\\", \\"echo back > /mnt/data/shared.txt; exit 3\\"]"}'],
            ["container.exec", "{}"],
            ["python", "print(open('/mnt/data/shared.txt').read())"],
        ]
    },
    {"calls": [["container.exec", '{"cmd": ["ls", "/mnt/data"]}']]},
]


@dataclass(frozen=True)
class Report:
    namespaces: list[str]
    prompt: str
    responses: list[list[str]]


def both(host: RunningHost) -> str:
    return f"{host.address}/python,{host.address}/container"


@pytest.fixture(scope="module", params=["bare", "both"])
def report(host: RunningHost, request: pytest.FixtureRequest) -> Report:
    """What one process of vLLM's classes saw. The container's script comes last: the bare host has only python."""
    server, script = (host.address, SCRIPT) if request.param == "bare" else (both(host), [*SCRIPT, *CONTAINER_SCRIPT])
    vocabulary = ENVIRONMENTS["vllm"].directory / "vocabulary"
    return Report(
        **drive(
            "vllm",
            "vllm_harmony.py",
            server,
            json.dumps(script),
            environment={"TIKTOKEN_ENCODINGS_BASE": str(vocabulary), "VLLM_LOGGING_LEVEL": "WARNING"},
            timeout_s=240,
        )
    )


def test_harmony_context_runs_three_turns_that_share_state(report: Report) -> None:
    assert report.namespaces[0] == "python"
    assert report.responses[0][2].strip() == "42"


def test_another_response_is_another_session(report: Report) -> None:
    assert "NameError" in report.responses[1][0]


def test_hidden_tools_are_not_in_the_prompt(report: Report) -> None:
    assert "## python" in report.prompt
    assert "cleanup_session" not in report.prompt
    assert "type python" not in report.prompt
    assert ("## container" in report.prompt) == ("container" in report.namespaces)


def test_a_retained_key_keeps_state_across_responses(report: Report) -> None:
    assert report.responses[3] == ["7"]


def test_code_that_raises_does_not_fail_the_response(report: Report) -> None:
    raised, empty, wrapped = report.responses[4]
    assert "ZeroDivisionError" in raised
    assert empty.strip()
    assert wrapped == "42"


@pytest.mark.parametrize("report", ["both"], indirect=True)
def test_python_and_container_share_a_file_and_shells_remember(report: Report) -> None:
    assert report.namespaces == ["python", "container"]
    assert "exec = (_: {" in report.prompt and "cmd: string[]" in report.prompt
    _, cat, _, shell, json_text, missing, python = report.responses[len(SCRIPT)]
    assert cat == "from python\n[Exit code 0.]"
    assert shell == "42 /tmp\n[Exit code 0.]"
    assert "[Exit code 3.]" in json_text
    assert '"cmd"' in missing
    assert python.startswith("back")
    assert "shared.txt" not in report.responses[len(SCRIPT) + 1][0], "another response is another sandbox"
