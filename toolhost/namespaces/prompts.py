"""Tool texts: our own, or the ones a model was trained with when the package that carries them is installed.

Above: namespaces. Below: optionally `openai_harmony`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

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
Tools that run code and commands in one sandbox that belongs to this session: variables, shells and the files below
/mnt/data stay from call to call, and what one tool leaves there the others find. Files that calls make are also this
server's resources. Results say when state was lost; nothing runs twice."""


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


def _trained_python() -> str | None:
    try:
        harmony = importlib.import_module("openai_harmony")
    except ImportError:
        return None
    text = harmony.ToolNamespaceConfig.python().description
    return str(text) if text else None
