"""The python namespace: code in, what it printed and its value out; the session's interpreter remembers.

Above: `mcp_server`, through the registry. Below: sandboxes' public API, `render`, `prompts`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sandboxes.errors import SandboxError
from sandboxes.spec import Execution, Outcome, PythonCall
from toolhost.config import PythonSettings
from toolhost.errors import BadArguments
from toolhost.namespaces import prompts
from toolhost.namespaces.base import CLEANUP, CallContext, Image, Link, Tool, ToolResult, cleanup
from toolhost.namespaces.render import receipt_meta, render

ATTEMPT_ID = "toolhost/attempt-id"
TIMEOUT = "toolhost/timeout"
RECEIPT = "toolhost/receipt"
ATTEMPT_CHARACTERS = 128
IMAGE_BYTES = 4 << 20  # of one image sent along; a larger one is named in the text only
IMAGES = 8

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


def attempt_id_of(meta: Mapping[str, Any]) -> str:
    """The attempt id that a caller minted, "" when it sent none. Raises BadArguments."""
    value = meta.get(ATTEMPT_ID, "")
    if not isinstance(value, str) or len(value) > ATTEMPT_CHARACTERS or not value.isprintable() or "/" in value:
        raise BadArguments(
            f"_meta {ATTEMPT_ID} must be a string of at most {ATTEMPT_CHARACTERS} printable characters without '/'. "
            "Nothing ran."
        )
    return value


def timeout_of(meta: Mapping[str, Any], settings: PythonSettings) -> float:
    """Seconds that a call may take: what the client asks for, within the operator's bound. Raises BadArguments."""
    value = meta.get(TIMEOUT)
    if value is None:
        return settings.timeout_s
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise BadArguments(f"_meta {TIMEOUT} must be a positive number of seconds. Nothing ran.")
    return min(float(value), settings.max_timeout_s)


async def result_of(outcome: Outcome, context: CallContext) -> ToolResult:
    """An outcome as a result: text for everybody, images and links for clients that take them."""
    receipt = receipt_meta(outcome.receipt)
    meta = {RECEIPT: receipt}
    if not context.rich:
        return ToolResult(render(outcome), meta=meta)
    links = [
        Link(f"file://{file.path}", file.path.rpartition("/")[2] or file.path, size=file.size) for file in outcome.files
    ]
    return ToolResult(
        render(outcome), meta=meta, images=await _images(outcome, context), links=links, structured={"receipt": receipt}
    )


async def _images(outcome: Outcome, context: CallContext) -> list[Image]:
    images = []
    for reference in outcome.images[:IMAGES]:
        try:
            data = await context.attachment.read_file(reference.path, IMAGE_BYTES)
        except SandboxError:
            continue  # the text names it: a missing or oversized image loses nothing else
        images.append(Image(data, reference.mime))
    return images


def _unwrapped(code: str) -> str:
    """A schema that leaked into the prompt makes models send `{"code": "…"}` as the code: take what they meant."""
    text = code.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return code
    try:
        value = json.loads(text)
    except ValueError:
        return code
    if isinstance(value, dict) and value.keys() == {"code"} and isinstance(value["code"], str):
        return str(value["code"])
    return code
