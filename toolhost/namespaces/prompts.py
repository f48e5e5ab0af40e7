"""Tool texts: our own, or the ones a model was trained with when the package that carries them is installed.

Above: namespaces. Below: optionally `openai_harmony`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from toolhost.namespaces.base import Namespace

PYTHON = """\
Use this tool to run Python code and to see what it does; the code itself is not shown to the user.
What you send to python runs in a stateful Jupyter-like session: variables, imports and the working directory are still
there in the next call. You get back what the code printed and the value of its last expression, or the traceback. A
call may take {timeout} seconds; longer ones are interrupted. Keep files below '/mnt/data', which is where the session
starts and where the user's files are. There may be no internet access."""


def python_instructions(timeout_s: float, *, override: str | None = None) -> str:
    """The prompt text of the python namespace."""
    if override is not None:
        return override
    return _trained_python() or PYTHON.format(timeout=f"{timeout_s:g}")


def all_instructions(namespaces: Mapping[str, Namespace]) -> str:
    """The text of the server that has every tool, for people's clients."""
    parts = [f"# {name}\n\n{namespace.instructions}" for name, namespace in namespaces.items()]
    return "\n\n".join(["Tools that run in a sandbox of this session; what one leaves there the others find.", *parts])


def _trained_python() -> str | None:
    try:
        harmony = importlib.import_module("openai_harmony")
    except ImportError:
        return None
    text = harmony.ToolNamespaceConfig.python().description
    return str(text) if text else None
