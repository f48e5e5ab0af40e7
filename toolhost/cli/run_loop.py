"""What `toolhost run` does once it knows what is wanted: connect, run, ask for consent, run on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import typer

from toolhost import interrupts
from toolhost.cli.printable import printable
from toolhost.cli.run import CANCELLED
from toolhost.cli.run_view import UntilBroken, make_view
from toolhost.loop.driver import LoopDriver, NoTools
from toolhost.loop.errors import LoopError
from toolhost.loop.models.registry import connect
from toolhost.loop.request import INCLUDE_CODE_OUTPUTS, Limits, LoopRequest, LoopResult
from toolhost.loop.tools import ToolServer
from toolhost.loop.trace import FileTraces

EXIT_OK, EXIT_FAILED, EXIT_WAITING, EXIT_CANCELLED = 0, 1, 3, CANCELLED


@dataclass(frozen=True, slots=True)
class Options:
    """The command's arguments. `deadline` is in seconds, `model` empty for the server's first one."""

    question: str
    url: str
    tools: Sequence[str]
    model: str
    dialect: str
    instructions: str
    as_json: bool
    approve: bool
    max_rounds: int
    deadline: float | None
    session: str
    api_key: str | None


async def ask_and_watch(options: Options, traces: FileTraces) -> int:
    """Run the command; its exit code. Raises LoopError for what cannot be started."""
    client = connect(options.dialect, options.url, options.api_key)
    try:
        server, namespaces = await _tool_server(options.tools) if options.tools else (NoTools(), [])
        request = LoopRequest(
            model=options.model or await _first_model(options.url, options.api_key),
            input=options.question,
            instructions=options.instructions or None,
            tools=[_tool(one, options.approve) for one in namespaces],
            limits=Limits(max_rounds=options.max_rounds, deadline=options.deadline),
            include=[INCLUDE_CODE_OUTPUTS],
            headers={"x-toolhost-session": options.session} if options.session else {},
        )
        driver = LoopDriver(client, tools=server)
        return await _converse(driver, request, make_view(options.as_json), traces)
    finally:
        await client.aclose()


async def _tool_server(endpoints: Sequence[str]) -> tuple[ToolServer, list[str]]:
    """The tool server and its namespaces. The MCP client is loaded here: without tools nobody waits for it."""
    from toolhost.loop.tool_client import McpToolServer

    server = await McpToolServer.connect(endpoints)
    return server, server.namespaces


async def _converse(driver: LoopDriver, request: LoopRequest, view: UntilBroken, traces: FileTraces) -> int:
    """Run, ask the user about what needs their consent, and go on."""
    while True:
        result = await _one_run(driver, request, view)
        kept = _save(traces, result)
        if view.broken is not None and not isinstance(view.broken, BrokenPipeError):
            # A pipe's reader that has seen enough is no failure; a full disk is.
            raise LoopError(f"the output cannot be written: {view.broken.strerror or view.broken}")
        waiting = [one for one in result.pending if one.kind == "approval"]
        if not waiting or not sys.stdin.isatty():
            if kept:
                typer.echo(f"trace: toolhost trace {result.response.id}", err=True)
            return _exit_code(result)
        answers = [_ask(one.id, f"{one.namespace}.{one.name} {one.arguments}") for one in waiting]
        request = replace(request, history=result.transcript, input=answers)


def _save(traces: FileTraces, result: LoopResult) -> bool:
    """Keep the trace; a run is not worth less for a full disk."""
    try:
        traces.save(result.trace)
    except OSError as error:
        typer.echo(f"toolhost run: warning: the trace is not saved: {error.strerror or error}", err=True)
        return False
    return True


async def _one_run(driver: LoopDriver, request: LoopRequest, view: UntilBroken) -> LoopResult:
    run = await driver.start(request)
    loop = asyncio.get_running_loop()
    with interrupts.first(lambda: loop.call_soon_threadsafe(run.cancel)), contextlib.closing(view):
        async for event in run.events():
            view.show(event)
            if view.broken is not None:
                run.cancel()  # nobody reads on, so the model and the tool need not go on
        result = await run.result()
        if result.response.status == "incomplete":
            view.note(f"incomplete: {_why(result, request.limits)}")
        elif result.response.status == "cancelled":
            view.note("cancelled")
        return result


def _why(result: LoopResult, limits: Limits) -> str:
    match result.why:
        case "round_limit":
            return f"the limit of {limits.max_rounds} rounds (--max-rounds)"
        case "truncated":
            return "the model server's answer broke off"
    return result.why


def _ask(approval_id: str, call: str) -> dict[str, Any]:
    approved = typer.confirm(f"Run {printable(call)}?", default=False, err=True)
    return {"type": "mcp_approval_response", "approval_request_id": approval_id, "approve": approved}


def _tool(namespace: str, approve: bool) -> dict[str, Any]:
    if namespace == "python" and not approve:
        return {"type": "code_interpreter", "container": {"type": "auto"}}
    if namespace == "browser" and not approve:
        return {"type": "web_search"}
    return {"type": "mcp", "server_label": namespace, "require_approval": "always" if approve else "never"}


async def _first_model(url: str, key: str | None) -> str:
    headers = {"Authorization": f"Bearer {key}", "x-api-key": key} if key else {}
    try:
        async with httpx2.AsyncClient(headers=headers, timeout=10.0) as http:
            response = await http.get(f"{url.rstrip('/')}/models")
            if response.is_success:
                return str(response.json()["data"][0]["id"])
            why = f"it answered {response.status_code} to {response.url.path}; an address mostly ends in /v1"
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        why = str(error) or type(error).__name__
    raise LoopError(f"the model server at {url} does not say which models it has; give --name ({why})")


def _exit_code(result: LoopResult) -> int:
    if result.pending:
        return EXIT_WAITING
    if result.response.status == "cancelled":
        return EXIT_CANCELLED
    return EXIT_OK if result.response.status == "completed" else EXIT_FAILED
