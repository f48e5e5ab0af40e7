"""Tool texts: our own, or the ones a model was trained with when the package that carries them is installed.

Above: namespaces. Below: optionally `openai_harmony`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolhost.namespaces.base import Tool

PYTHON = """\
Use this tool to run Python code and to see what it does; the code itself is not shown to the user.
What you send to python runs in a stateful Jupyter-like session: variables, imports and the working directory are still
there in the next call. You get back what the code printed and the value of its last expression, or the traceback. A
call may take {timeout} seconds; longer ones are interrupted. Keep files below '/mnt/data', which is where the session
starts and where the user's files are. There may be no internet access."""

CONTAINER = """\
Use this tool to run commands in a Linux sandbox; the user does not see them. `exec` takes the program and its arguments
as a list, for example ["bash", "-lc", "grep -c x data.csv"], and you get back the output and the exit code. With a
`session_name` the command runs in a shell of that name, which keeps its directory, variables and background jobs for
the next call. Files below '/mnt/data', where commands start, are the ones that python has. A command may take {timeout}
seconds unless you give another `timeout`; longer ones are interrupted. There may be no internet access."""

EVERYTHING = """\
Tools that run code and commands in one sandbox that belongs to this session, and a text browser with the session's own
pages: variables, shells, pages and the files below /mnt/data stay from call to call, and what one tool leaves in the
sandbox the others find. Files that calls make are also this server's resources. Results say when state was lost."""


BROWSER = """\
Use these tools to look things up in a text browser.
Each page that it shows begins with its `cursor` in square brackets: `[{cursor}]`. Lines are numbered: `L{line}`.
Give sources in the form `【{cursor}†L{line_start}(-L{line_end})?】`, like `【4†L12-L15】` or `【7†L2】`.
Copy at most 10 words in a row from what the tools show; say the rest in your own words.
sources=web"""

_READS = {"readOnlyHint": True, "openWorldHint": True}
_NUMBER = {"type": "number", "default": -1}

BROWSER_TOOLS = (
    Tool(
        name="search",
        description="Looks for `query` and shows the best `topn` results as a page of links.",
        input_schema={
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "topn": {"type": "number", "default": 10},
                "source": {"type": "string"},
            },
            "required": ["query"],
        },
        title="Search",
        hints=_READS,
    ),
    Tool(
        name="open",
        description=(
            "Opens a link of the page at `cursor` (the newest page by default) by its number `id`, and shows "
            "`num_lines` lines from line `loc` on.\n"
            "Links look like `【{id}†text】`.\n"
            "A string as `id` is a whole URL.\n"
            "Without `loc` the page begins at its top, or near the passage that a search or `find` led to.\n"
            "Without `id` it shows another part of a page that is open: that is how to scroll."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "id": {"anyOf": [{"type": "number"}, {"type": "string"}], "default": -1},
                "cursor": _NUMBER,
                "loc": _NUMBER,
                "num_lines": _NUMBER,
                "view_source": {"type": "boolean", "default": False},
                "source": {"type": "string"},
            },
        },
        title="Open a page",
        hints=_READS,
    ),
    Tool(
        name="find",
        description="Finds the places where `pattern` stands in the page at `cursor` (the newest page by default).",
        input_schema={
            "type": "object",
            "properties": {"pattern": {"type": "string"}, "cursor": _NUMBER},
            "required": ["pattern"],
        },
        title="Find in a page",
        hints=_READS,
    ),
)


def python_instructions(timeout_s: float, *, override: str | None = None) -> str:
    """The prompt text of the python namespace."""
    if override is not None:
        return override
    return _trained_python() or PYTHON.format(timeout=f"{timeout_s:g}")


def container_instructions(timeout_s: float) -> str:
    """The prompt text of the container namespace."""
    return CONTAINER.format(timeout=f"{timeout_s:g}")


def all_instructions(tools: Iterable[Tool]) -> str:
    """The text of the server that has every tool, for people's clients: what models of the harmony format were trained
    with (code that users do not see, analysis channels) would mislead other models."""
    return "\n".join([EVERYTHING, "", *(f"- {tool.name}: {tool.description}" for tool in tools)])


@dataclass(frozen=True, slots=True)
class Texts:
    """What a client renders of a namespace into a prompt."""

    instructions: str
    tools: tuple[Tool, ...]


def browser_texts() -> Texts:
    """The browser's: trained ones where the package has them, for each tool that it knows."""
    trained = _trained("browser")
    if trained is None or not trained.description:
        return Texts(BROWSER, BROWSER_TOOLS)
    known = {str(tool.name): tool for tool in trained.tools}
    tools = tuple(_with_texts_of(known[tool.name], tool) if tool.name in known else tool for tool in BROWSER_TOOLS)
    return Texts(str(trained.description), tools)


def _with_texts_of(trained: Any, tool: Tool) -> Tool:
    return replace(tool, description=str(trained.description), input_schema=_flat(trained.parameters))


def _flat(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A list of types as alternatives of one type each: clients rewrite those, and some know nothing else."""
    flat = {**schema, "properties": dict(schema.get("properties", {}))}
    for name, value in flat["properties"].items():
        if isinstance(types := value.get("type"), list):
            rest = {key: part for key, part in value.items() if key != "type"}
            flat["properties"][name] = {"anyOf": [{"type": kind} for kind in types], **rest}
    return flat


def _trained(namespace: str) -> Any:
    """The package's ToolNamespaceConfig, None without the package."""
    try:
        harmony = importlib.import_module("openai_harmony")
    except ImportError:
        return None
    return getattr(harmony.ToolNamespaceConfig, namespace)()


def _trained_python() -> str | None:
    trained = _trained("python")
    return str(trained.description) if trained is not None and trained.description else None
