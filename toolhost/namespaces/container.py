"""The container namespace: a command in, its output and exit code out; named shells remember.

Above: `mcp_server`, through the registry. Below: sandboxes' public API, `executions`, `prompts`.
Commands run in the same sandbox, on the same files, as the python namespace's code.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sandboxes.spec import Execution, ShellCall
from toolhost.config import PythonSettings
from toolhost.errors import BadArguments
from toolhost.namespaces import prompts
from toolhost.namespaces.base import CLEANUP, CallContext, Tool, ToolResult, cleanup
from toolhost.namespaces.executions import attempt_id_of, bounded, result_of, timeout_of

ARGUMENTS = ("cmd", "workdir", "env", "session_name", "timeout", "user")
EXAMPLE = '{"cmd": ["bash", "-lc", "ls -l | head"]}'
SHELL = re.compile(r"(?:(?:/usr)?/bin/)?(?:ba|da)?sh")
SHELL_FLAGS = ("-c", "-lc", "-cl")  # `bash -lc SCRIPT`, as models write it

EXEC = Tool(
    name="exec",
    description=(
        "Runs a command in the session's Linux sandbox and answers with its output and exit code. Files in /mnt/data "
        "are the ones that python sees. With session_name it runs in a shell of that name, whose directory, variables "
        "and background jobs stay for the next call."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "cmd": {
                "type": "array",
                "items": {"type": "string"},
                "description": 'The program and its arguments; no shell is implied: ["bash", "-lc", "ls | wc -l"].',
            },
            "workdir": {"type": "string", "description": "Directory to run in. Default /mnt/data."},
            "env": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Environment variables to add.",
            },
            "session_name": {"type": "string", "description": "Name of a shell that stays; made on first use."},
            "timeout": {"type": "number", "description": "Seconds that the command may take."},
            "user": {"type": "string", "description": "Only the sandbox's own user is there; leave it out."},
        },
        "required": ["cmd"],
    },
    title="Run a command",
    attempts=True,
    hints={"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False, "openWorldHint": False},
)


class ContainerNamespace:
    """See `base.Namespace`. Times and sizes of a call are those of the python namespace."""

    name = "container"
    tools: Sequence[Tool] = (EXEC, CLEANUP)

    def __init__(self, settings: PythonSettings) -> None:
        self._settings = settings
        self.instructions = prompts.container_instructions(settings.timeout_s)

    async def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        if name == CLEANUP.name:
            return await cleanup(context)
        execution = Execution(
            shell_call(arguments),
            attempt_id=attempt_id_of(context.meta),
            timeout_s=self._timeout(arguments, context.meta),
            max_characters=self._settings.max_characters,
        )
        outcome = await context.attachment.run(execution, context.on_event)
        return await result_of(outcome, context)

    def _timeout(self, arguments: Mapping[str, Any], meta: Mapping[str, Any]) -> float:
        value = arguments.get("timeout")
        if value is None or value == "":
            return timeout_of(meta, self._settings)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # `bounded` says what it must be
                value = float(value)
        return bounded(value, 'The argument "timeout" of exec', self._settings)


def shell_call(arguments: Mapping[str, Any]) -> ShellCall:
    """What `exec` was asked for. Raises BadArguments."""
    unknown = sorted(str(name)[:40] for name, value in arguments.items() if name not in ARGUMENTS and value is not None)
    if unknown:
        raise BadArguments(f"exec has no argument {unknown[0]!r}; it takes {', '.join(ARGUMENTS)}. Nothing ran.")
    shell = _text(arguments, "session_name")
    cmd = command_of(arguments.get("cmd"))
    if shell is not None and not isinstance(cmd, str):
        cmd = _for_shell(cmd)
    return ShellCall(
        cmd,
        workdir=_text(arguments, "workdir"),
        env=environment_of(arguments.get("env")),
        shell=shell,
        user=_text(arguments, "user"),
    )


def command_of(value: object) -> tuple[str, ...] | str:
    """A command as models send it: a list of words, a text for a shell, or a text that is the JSON of a list.

    Raises BadArguments.
    """
    if value is None or value in ("", []):
        raise BadArguments(f'exec needs the argument "cmd", for example {EXAMPLE}. Nothing ran.')
    if isinstance(value, str):
        words = _json(value, "[")
        if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
            value = words
        else:
            if not value.strip():
                raise BadArguments(f'The argument "cmd" of exec is empty; for example {EXAMPLE}. Nothing ran.')
            return _without_nul(value, "cmd")
    if not isinstance(value, list):
        raise BadArguments(
            f'The argument "cmd" of exec must be a list of strings or one string, not {type(value).__name__}; '
            f"for example {EXAMPLE}. Nothing ran."
        )
    parts = tuple(_word(word) for word in value)
    if not parts[0].strip():
        raise BadArguments(
            f'The first part of "cmd" of exec is the program, and it is empty; for example {EXAMPLE}. Nothing ran.'
        )
    return parts


def environment_of(value: object) -> dict[str, str]:
    """The variables of a call; an object, or a text that is the JSON of one. Raises BadArguments."""
    if isinstance(value, str):
        value = _json(value, "{") if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadArguments('The argument "env" of exec must be an object: {"NAME": "value"}. Nothing ran.')
    found: dict[str, str] = {}
    for name, text in value.items():
        if isinstance(text, int | float) and not isinstance(text, bool):
            text = str(text)
        if not isinstance(text, str):
            raise BadArguments(f'"env" of exec: the value of {str(name)[:40]!r} must be a string. Nothing ran.')
        if not name or "=" in name:
            raise BadArguments(f'"env" of exec: {str(name)[:40]!r} is not the name of a variable. Nothing ran.')
        found[_without_nul(name, "env")] = _without_nul(text, "env")
    return found


def _word(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # ["sleep", 5]
    if not isinstance(value, str):
        raise BadArguments(
            f'Every part of "cmd" of exec must be a string, not {type(value).__name__}; for example {EXAMPLE}. '
            "Nothing ran."
        )
    return _without_nul(value, "cmd")


def _for_shell(words: tuple[str, ...]) -> str:
    """Words for a shell that is there already. `bash -lc SCRIPT` means its script: in a shell below the named one
    nothing would stay."""
    if len(words) == 3 and SHELL.fullmatch(words[0]) and words[1] in SHELL_FLAGS and words[2].strip():
        return words[2]
    return shlex.join(words)


def _text(arguments: Mapping[str, Any], name: str) -> str | None:
    value = arguments.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BadArguments(f'The argument "{name}" of exec must be a string, not {type(value).__name__}. Nothing ran.')
    return _without_nul(value, name)


def _without_nul(text: str, name: str) -> str:
    if "\0" in text:
        raise BadArguments(f'The argument "{name}" of exec contains a NUL character. Nothing ran.')
    return text


def _json(text: str, start: str) -> object:
    """What a text is the JSON of; the text itself when it is none."""
    if not text.lstrip().startswith(start):
        return text
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value
