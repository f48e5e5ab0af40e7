"""The official conformance suite against `/mcp`, every server scenario.

The suite drives a server made for it: most scenarios call a sample tool, prompt or resource by name, or a feature that
a server may leave out. Those are listed with the reason; the list is exact, so that one that begins to pass is seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conformance_results import failures
from tests.clients.drive import run
from tests.clients.environments import ENVIRONMENTS
from tests.support.host import RunningHost

pytestmark = [pytest.mark.clients, pytest.mark.bubblewrap, pytest.mark.timeout(240)]

SAMPLE_TOOL = "calls a sample tool of the suite's own server"
SAMPLE_PROMPT = "needs the sample prompts of the suite's own server; this host has no prompts"
SAMPLE_RESOURCE = "reads a sample resource of the suite's own server, without a call that would make a file"
NOT_OFFERED = "needs a feature that this host does not declare among its capabilities"

NEEDS_MORE = {
    "completion-complete": SAMPLE_PROMPT,
    "elicitation-sep1034-defaults": SAMPLE_TOOL,
    "elicitation-sep1330-enums": SAMPLE_TOOL,
    "json-schema-2020-12": SAMPLE_TOOL,
    "logging-set-level": NOT_OFFERED,
    "prompts-get-embedded-resource": SAMPLE_PROMPT,
    "prompts-get-simple": SAMPLE_PROMPT,
    "prompts-get-with-args": SAMPLE_PROMPT,
    "prompts-get-with-image": SAMPLE_PROMPT,
    "prompts-list": SAMPLE_PROMPT,
    "resources-read-binary": SAMPLE_RESOURCE,
    "resources-read-text": SAMPLE_RESOURCE,
    "resources-subscribe": NOT_OFFERED,
    "resources-templates-read": SAMPLE_RESOURCE,
    "resources-unsubscribe": NOT_OFFERED,
    "server-sse-polling": SAMPLE_TOOL,
    "tools-call-audio": SAMPLE_TOOL,
    "tools-call-elicitation": SAMPLE_TOOL,
    "tools-call-embedded-resource": SAMPLE_TOOL,
    "tools-call-image": SAMPLE_TOOL,
    "tools-call-mixed-content": SAMPLE_TOOL,
    "tools-call-sampling": SAMPLE_TOOL,
    "tools-call-with-logging": SAMPLE_TOOL,
    "tools-call-with-progress": SAMPLE_TOOL,
}


@pytest.fixture(scope="module")
def results(tool_host: RunningHost, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Per scenario what its checks say is wrong."""
    output: Path = tmp_path_factory.mktemp("conformance")
    environment = ENVIRONMENTS["node"]
    suite = environment.modules / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    command = ["server", "--url", f"{tool_host.url}/mcp", "--suite", "all", "-o", str(output)]
    done = run("node", str(environment.node), str(suite), *command, timeout_s=200)
    found = failures(output)
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return found


def test_every_scenario_passes_that_needs_nothing_of_the_suite_s_own_server(results: dict[str, list[str]]) -> None:
    wrong = {name: problems for name, problems in results.items() if problems and name not in NEEDS_MORE}
    assert wrong == {}


def test_the_scenarios_that_are_listed_do_fail_and_for_their_reason(results: dict[str, list[str]]) -> None:
    assert NEEDS_MORE.keys() <= results.keys()
    assert [name for name in NEEDS_MORE if not results[name]] == []
    for name, reason in NEEDS_MORE.items():
        if reason in (SAMPLE_PROMPT, NOT_OFFERED) and name != "completion-complete":
            assert "Method not found" in results[name][0], name


def test_the_suite_ran_the_scenarios_that_this_host_must_pass(results: dict[str, list[str]]) -> None:
    assert {
        *("server-initialize", "ping", "tools-list", "tools-call-simple-text", "tools-call-error", "resources-list"),
        *("server-sse-multiple-streams", "dns-rebinding-protection"),
    } <= results.keys()
