"""What a client is told of the browser: trained texts where the package has them, else own ones with the same facts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from toolhost.namespaces import prompts
from toolhost.namespaces.base import Tool

PARAMETERS = {
    "search": [("query", None), ("topn", 10), ("source", None)],
    "open": [
        ("id", -1),
        ("cursor", -1),
        ("loc", -1),
        ("num_lines", -1),
        ("view_source", False),
        ("source", None),
    ],
    "find": [("pattern", None), ("cursor", -1)],
}


@pytest.fixture(params=["own", "trained"])
def texts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> prompts.Texts:
    if request.param == "own":
        monkeypatch.setitem(sys.modules, "openai_harmony", None)  # as if it were not installed
    else:
        pytest.importorskip("openai_harmony", reason="needs the extra toolhost[harmony]")
    return prompts.browser_texts()


def parameters(tool: Tool) -> list[tuple[str, Any]]:
    return [(name, schema.get("default")) for name, schema in tool.input_schema["properties"].items()]


def test_parameters_have_the_trained_order_and_defaults(texts: prompts.Texts) -> None:
    assert {tool.name: parameters(tool) for tool in texts.tools} == PARAMETERS


def test_the_facts_that_a_model_needs_are_there(texts: prompts.Texts) -> None:
    text = texts.instructions
    assert "`[{cursor}]`" in text
    assert "`【{cursor}†L{line_start}(-L{line_end})?】`" in text
    assert "10 words" in text
    assert text.splitlines()[-1].startswith("sources=web")
    described = {tool.name: tool.description for tool in texts.tools}
    assert "topn" in described["search"]
    assert all(word in described["open"] for word in ("`id`", "`cursor`", "`loc`", "`num_lines`", "【{id}†", "URL"))
    assert "`pattern`" in described["find"]


def test_schemas_are_flat_and_every_alternative_has_one_type(texts: prompts.Texts) -> None:
    for tool in texts.tools:
        for schema in tool.input_schema["properties"].values():
            for alternative in schema.get("anyOf", [schema]):
                assert alternative["type"] in {"string", "number", "boolean"}
                assert not {"properties", "$ref", "items"} & alternative.keys()


def test_our_own_wording_ends_with_the_sources_line_and_is_not_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    harmony = pytest.importorskip("openai_harmony", reason="needs the extra toolhost[harmony]")
    trained: Mapping[str, str] = {tool.name: tool.description for tool in harmony.ToolNamespaceConfig.browser().tools}
    monkeypatch.setitem(sys.modules, "openai_harmony", None)
    own = prompts.browser_texts()
    assert own.instructions.splitlines()[-1] == "sources=web"
    assert all(trained[tool.name] != tool.description for tool in own.tools)
