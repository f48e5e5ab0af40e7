"""The interface that the loop shares with vLLM, tried with vLLM's own classes on either side."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import ENVIRONMENTS, ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


def test_driver_runs_over_vllms_tool_server_and_vllms_context_over_ours() -> None:
    environment = ENVIRONMENTS["vllm"]
    script = Path(__file__).with_name("vllm_both_ways.py")
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TIKTOKEN_ENCODINGS_BASE": str(environment.directory / "vocabulary"),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    done = subprocess.run(
        [environment.python, script], env=variables, capture_output=True, text=True, timeout=170, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stderr
    report = json.loads(lines[-1].removeprefix("REPORT "))
    assert report["theirs"] == report["ours"]
    outputs = [item["output"] for item in report["ours"]["transcript"] if item["type"] == "function_call_output"]
    assert outputs[-1] == "42\n"
    assert report["ours"]["cleaned"] == [["resp_0001", "browser"], ["resp_0001", "python"]]
    assert report["harmony"]["answers"][1:] == ["5\n", '{"search": {"query": "z"}}', '{"exec": {"cmd": ["ls"]}}']
    assert report["harmony"]["cleaned"] == [["resp_abc", name] for name in ("browser", "container", "python")]
