"""`toolhost run`: one question through the loop, from a terminal or in a pipe."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import httpx2
import platformdirs
import typer

from toolhost.cli.run_view import View, make_view
from toolhost.loop.driver import LoopDriver, NoTools
from toolhost.loop.errors import LoopError
from toolhost.loop.models.registry import ADAPTERS, connect
from toolhost.loop.request import INCLUDE_CODE_OUTPUTS, Limits, LoopRequest, LoopResult
from toolhost.loop.tool_client import McpToolServer
from toolhost.loop.trace import FileTraces

EXIT_OK, EXIT_FAILED, EXIT_WAITING, EXIT_CANCELLED = 0, 1, 3, 130


def default_traces() -> Path:
    """Where runs leave their traces."""
    return platformdirs.user_state_path("toolhost") / "traces"


def run(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    model: Annotated[str, typer.Option(help="Base URL of the model server, up to /v1.")],
    tools: Annotated[str, typer.Option(help="Comma-separated HOST:PORT/namespace, or MCP URLs.")] = "",
    name: Annotated[str, typer.Option(help="The model's name; the server's first one if not given.")] = "",
    dialect: Annotated[str, typer.Option(help=f"What the server speaks: {', '.join(ADAPTERS)}.")] = "chat",
    instructions: Annotated[str, typer.Option(help="Instructions for the model.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print every event as one line of JSON.")] = False,
    approve: Annotated[bool, typer.Option("--approve", help="Ask before each tool call.")] = False,
    max_rounds: Annotated[int, typer.Option(help="Model rounds before one last round without tools.", min=1)] = 20,
    deadline: Annotated[float | None, typer.Option(help="Seconds for the whole run.", min=0.1)] = None,
    session: Annotated[str, typer.Option(help="A session key whose state the tools keep.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the model server's key.", exists=True)] = None,
    trace_dir: Annotated[Path | None, typer.Option(help="Where the trace is written.")] = None,
) -> None:
    """Ask a model that may use tools, and watch it work. Ctrl-C cancels the model and the tool."""
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # its clients log what is reported as a result here
    key = api_key_file.read_text(encoding="utf-8").strip() if api_key_file else None
    request = LoopRequest(
        model=name,
        input=question,
        instructions=instructions or None,
        limits=Limits(max_rounds=max_rounds, deadline=deadline),
        include=[INCLUDE_CODE_OUTPUTS],
        headers={"x-toolhost-session": session} if session else {},
    )
    specs = [spec for spec in tools.split(",") if spec.strip()]
    traces = FileTraces(trace_dir or default_traces())
    try:
        code = asyncio.run(_run(request, dialect, model, key, specs, approve, make_view(as_json), traces))
    except LoopError as error:
        typer.echo(f"toolhost run: {error}", err=True)
        code = EXIT_FAILED
    raise typer.Exit(code)


async def _run(
    request: LoopRequest,
    dialect: str,
    url: str,
    key: str | None,
    specs: Sequence[str],
    approve: bool,
    view: View,
    traces: FileTraces,
) -> int:
    client = connect(dialect, url, key)
    try:
        server = await McpToolServer.connect(specs) if specs else None
        driver = LoopDriver(client, tools=server or NoTools())
        namespaces = server.namespaces if server else []
        name = request.model or await _first_model(url, key)
        request = replace(request, model=name, tools=[_tool(one, approve) for one in namespaces])
        return await _converse(driver, request, view, traces)
    finally:
        await client.aclose()


async def _converse(driver: LoopDriver, request: LoopRequest, view: View, traces: FileTraces) -> int:
    """Run, ask the user about what needs their consent, and go on."""
    while True:
        result = await _one_run(driver, request, view)
        traces.save(result.trace)
        waiting = [one for one in result.pending if one.kind == "approval"]
        if not waiting or not sys.stdin.isatty():
            typer.echo(f"trace: toolhost trace {result.response.id}", err=True)
            return _exit_code(result)
        answers = [_ask(one.id, f"{one.namespace}.{one.name} {one.arguments}") for one in waiting]
        request = replace(request, history=result.transcript, input=answers)


async def _one_run(driver: LoopDriver, request: LoopRequest, view: View) -> LoopResult:
    run = await driver.start(request)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, run.cancel)
    try:
        async for event in run.events():
            view.show(event)
        return await run.result()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        view.close()


def _ask(approval_id: str, call: str) -> dict[str, Any]:
    approved = typer.confirm(f"Run {call}?", default=False, err=True)
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
            return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise LoopError(f"the model server at {url} does not say which models it has; give --name ({error})") from error


def _exit_code(result: LoopResult) -> int:
    if result.pending:
        return EXIT_WAITING
    if result.response.status == "cancelled":
        return EXIT_CANCELLED
    return EXIT_OK if result.response.status == "completed" else EXIT_FAILED
