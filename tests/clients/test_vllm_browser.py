"""vLLM's own classes and the browser, without key or network: the host's corpus has this project's documentation."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.clients.drive import drive
from tests.clients.environments import ENVIRONMENTS
from tests.support.host import RunningHost

pytestmark = [pytest.mark.vllm, pytest.mark.bubblewrap, pytest.mark.timeout(300)]

KEY = "browser-0123456789abcdefghijkl"
CALLS = [
    ["search", {"query": "folders of the corpus", "topn": 3}],
    ["open", {"id": 0}],
    ["find", {"pattern": "index"}],
    ["open", {"id": 999}],
]


@dataclass(frozen=True)
class Report:
    namespaces: list[str]
    rendered: str
    trained: str
    calls: list[str]
    again: list[str]
    other: list[str]


@pytest.fixture(scope="module")
def browsing_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHost]:
    running = RunningHost(tmp_path_factory.mktemp("browsing") / "state").start()
    yield running
    running.purge()


@pytest.fixture(scope="module")
def report(browsing_host: RunningHost) -> Report:
    vocabulary: Path = ENVIRONMENTS["vllm"].directory / "vocabulary"
    address = browsing_host.address
    return Report(
        **drive(
            "vllm",
            "vllm_browser.py",
            *(f"{address}/python,{address}/browser", json.dumps(CALLS), KEY),
            environment={"TIKTOKEN_ENCODINGS_BASE": str(vocabulary), "VLLM_LOGGING_LEVEL": "WARNING"},
            timeout_s=240,
        )
    )


@pytest.mark.skipif(importlib.util.find_spec("openai_harmony") is None, reason="needs the extra toolhost[harmony]")
def test_the_prompt_is_the_one_that_the_harmony_package_renders(report: Report) -> None:
    assert report.namespaces == ["python", "browser"]
    assert "sources=web" in report.trained
    assert report.rendered == report.trained


def test_search_open_and_find_work_from_the_documentation(report: Report) -> None:
    searched, opened, found, wrong = report.calls
    assert searched.startswith("[0] folders of the corpus\n**viewing lines [0 - ")
    assert "【0†The browser†toolhost】" in searched
    assert opened.startswith("[1] The browser (corpus://toolhost/browser.md)\n**viewing lines [")
    assert found.startswith("[2] Find results for text: `index` in `The browser`")
    assert "# 【0†match at L" in found
    assert wrong.startswith("Invalid link id `999`. Valid ids on this page: 0-")


def test_a_retained_key_keeps_the_pages_for_another_response_and_no_other_has_them(report: Report) -> None:
    assert report.again[0].startswith("[3] Find results for text: `corpus`")
    assert report.other == ["No pages to access!"]


def test_a_citation_of_the_response_resolves_after_it(report: Report, browsing_host: RunningHost) -> None:
    first = report.calls[1].partition("**viewing lines [")[2].partition(" ")[0]
    path = f"/v1/sessions/retained/{KEY}/citations?citation={quote(f'【1†L{first}】')}"
    (cited,) = browsing_host.get_json(path)["citations"]
    assert cited["url"] == "corpus://toolhost/browser.md"
    assert f"L{first}: {cited['lines'][0]}" in report.calls[1]
