"""Plain Python functions as client tools: for applications that use the loop as a library.

A function's signature and docstring are its description; its calls end a response as any client function's do, and
`converse` answers them and goes on. Results pass the acceptance table like everybody's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError, create_model

from toolhost.loop.driver import LoopDriver
from toolhost.loop.ledger import CLIENT, Arrival, Ledger, Verdict, digest
from toolhost.loop.request import LoopRequest, LoopResult, Pending
from toolhost.loop.transcript import Item, output_item

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PythonTool:
    """A function with the schema of its arguments. `function` may be plain (it runs in a thread) or async."""

    function: Function
    arguments: TypeAdapter[Any]

    @property
    def name(self) -> str:
        return self.function.__name__

    def as_tool(self) -> dict[str, Any]:
        """In the Responses API's shape."""
        return {
            "type": "function",
            "name": self.name,
            "description": inspect.getdoc(self.function) or "",
            "parameters": self.arguments.json_schema(),
            "strict": False,
        }

    async def call(self, arguments: str) -> str:
        """Call it with a model's JSON arguments; what goes wrong comes back as text that the model can act on."""
        try:
            values = self.arguments.validate_json(arguments or "{}")
        except ValidationError as error:
            return f"The arguments do not fit: {error.errors(include_url=False, include_context=False)}"
        given = {name: getattr(values, name) for name in type(values).model_fields}
        try:
            if inspect.iscoroutinefunction(self.function):
                result = await self.function(**given)
            else:
                result = await asyncio.to_thread(self.function, **given)
        except Exception as error:  # noqa: BLE001 - the application's own function; the model is told
            return f"The function failed: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def python_tool(function: Function) -> PythonTool:
    """A function as a tool. Every parameter needs a type annotation; raises TypeError if one has none."""
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.annotation is parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise TypeError(f"parameter {name!r} of {function.__name__} needs a name and a type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (parameter.annotation, default)
    return PythonTool(function, TypeAdapter(create_model(function.__name__, **fields)))


async def answer(ledger: Ledger, task: str, pending: Pending, tool: PythonTool) -> Item | None:
    """Execute a pending call; its output item, or None if the result was not accepted."""
    text = await tool.call(pending.arguments)
    record = await ledger.registry.call(task, pending.id)
    if record is None:
        return None
    arrival = Arrival(
        task=task,
        generation=record.generation,
        call_id=pending.id,
        attempt=record.attempt.id,
        tool=pending.name,
        arguments=record.arguments,
        executor=CLIENT,
        content=digest(text),
    )
    verdict = await ledger.deliver(arrival, time.time())
    return output_item(pending.id, text) if verdict is Verdict.ACCEPTED else None


async def converse(
    driver: LoopDriver, request: LoopRequest, functions: Iterable[Function], max_turns: int = 10
) -> LoopResult:
    """Run a request and answer its calls to these functions, for at most `max_turns` responses.

    The last result is returned; it has something `pending` if the turns ran out or somebody else has to act.
    """
    tools = {tool.name: tool for tool in map(python_tool, functions)}
    request = replace(request, tools=[*request.tools, *(tool.as_tool() for tool in tools.values())])
    for turn in range(max_turns):
        run = await driver.start(request)
        result = await run.result()
        ours = [one for one in result.pending if one.kind == "function_call" and one.name in tools]
        if not ours or len(ours) < len(result.pending) or turn == max_turns - 1:
            break
        outputs = [await answer(driver.ledger, result.response.id, one, tools[one.name]) for one in ours]
        given = [item for item in outputs if item is not None]
        request = replace(request, history=result.transcript, input=given, response_id=None, tool_choice="auto")
    return result
