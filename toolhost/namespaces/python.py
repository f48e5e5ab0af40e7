"""The python namespace: code in, what it printed and its value out; the session's interpreter remembers.

Above: `mcp_server`, through the registry. Below: sandboxes' public API, `executions`, `prompts`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sandboxes.spec import Execution, PythonCall
from toolhost.config import PythonSettings
from toolhost.errors import BadArguments
from toolhost.namespaces import prompts
from toolhost.namespaces.base import CLEANUP, CallContext, Tool, ToolResult, cleanup
from toolhost.namespaces.executions import attempt_id_of, result_of, timeout_of

PYTHON = Tool(
    name="python",
    description=(
        "Runs Python code in a stateful Jupyter-like session and answers with what it printed, the value of the last "
        "expression, or the traceback. Variables, imports and files in /mnt/data stay for the next call."
    ),
    input_schema={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The Python code to run."}},
        "required": ["code"],
    },
    title="Run Python",
    attempts=True,
    hidden=True,  # models of the harmony format write bare code to `python`, not arguments
    hints={"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False, "openWorldHint": False},
)


class PythonNamespace:
    """See `base.Namespace`."""

    name = "python"
    tools: Sequence[Tool] = (PYTHON, CLEANUP)

    def __init__(self, settings: PythonSettings) -> None:
        self._settings = settings
        self.instructions = prompts.python_instructions(settings.timeout_s, override=settings.instructions)

    async def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        if name == CLEANUP.name:
            return await cleanup(context)
        execution = Execution(
            PythonCall(code_of(arguments)),
            attempt_id=attempt_id_of(context.meta),
            timeout_s=timeout_of(context.meta, self._settings),
            max_characters=self._settings.max_characters,
        )
        outcome = await context.attachment.run(execution, context.on_event)
        return await result_of(outcome, context)


def code_of(arguments: Mapping[str, Any]) -> str:
    """The code of a call. Raises BadArguments."""
    code = arguments.get("code")
    if isinstance(code, list) and all(isinstance(line, str) for line in code):
        code = "\n".join(code)
    if code is None:
        got = f" (got: {', '.join(sorted(map(str, arguments))[:8])})" if arguments else ""
        raise BadArguments(f'python needs the argument "code", a string of Python source{got}.')
    if not isinstance(code, str):
        raise BadArguments(f'The argument "code" of python must be a string, not {type(code).__name__}.')
    return _unwrapped(code)


def _unwrapped(code: str) -> str:
    """A schema that leaked into the prompt makes models send `{"code": "…"}` as the code: take what they meant."""
    text = code.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return code
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return code
    if isinstance(value, dict) and value.keys() == {"code"} and isinstance(value["code"], str):
        return str(value["code"])
    return code
