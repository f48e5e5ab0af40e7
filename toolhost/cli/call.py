"""`toolhost call`: one tool call from a terminal, as any MCP client would make it.

Above: the command table. Below: the `mcp` SDK's client.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolhost.cli.serve import fail

CALL_FAILED = 1


def call(
    text: Annotated[str, typer.Argument(help="Code for python (- reads standard input); else JSON arguments.")],
    session: Annotated[str, typer.Option(metavar="ID", help="Calls with one id share variables and files.")] = "cli",
    url: Annotated[str, typer.Option(metavar="HOST:PORT", help="The tool host.")] = "127.0.0.1:8000",
    tool: Annotated[str, typer.Option(metavar="NAMESPACE.TOOL", help="Which tool.")] = "python.python",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the access token, where the host wants one.")
    ] = None,
) -> None:
    """Call a tool of a running host and print what a model would read.

    Two calls with one --session share state:

      toolhost call --session demo "x = 41"

      toolhost call --session demo "x + 1"

    Exit codes: 0 the tool answered, 1 it answered with an error, 2 no answer (the host cannot be reached, bad options).
    """
    namespace, dot, name = tool.partition(".")
    if not dot:
        name = namespace
    if text == "-":
        text = sys.stdin.read()
    arguments = {"code": text} if name == "python" else _arguments(text)
    headers = {"x-session-id": session}
    if token_file is not None:
        headers["authorization"] = f"Bearer {_token(token_file)}"
    address = url.removeprefix("http://").rstrip("/")
    answer, is_error = _ask(f"http://{address}/{namespace}/sse", headers, name, arguments)
    typer.echo(answer)
    raise typer.Exit(CALL_FAILED if is_error else 0)


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError as error:
        fail(f'the tool\'s arguments are not JSON ({error}); for example \'{{"cmd": ["ls"]}}\'')
    if not isinstance(arguments, dict):
        fail("the tool's arguments must be a JSON object")
    return arguments


def _token(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        fail(f"cannot read the token in {file}: {error.strerror or error}")


def _ask(url: str, headers: dict[str, str], tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    import httpx2
    from mcp import MCPError

    try:
        return asyncio.run(_call(url, headers, tool, arguments))
    except (ExceptionGroup, httpx2.HTTPError, OSError, MCPError) as error:
        cause = _first(error)
        if isinstance(cause, MCPError):
            fail(f"{url}: {cause}")
        if not isinstance(cause, (httpx2.HTTPError, OSError)):
            raise
        fail(_unreachable(url, cause))


async def _call(url: str, headers: dict[str, str], tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """The text of the result, and whether it is the host's own failure or refusal."""
    from mcp import ClientSession
    from mcp.client.sse import sse_client

    async with sse_client(url, headers=headers) as streams, ClientSession(*streams) as client:
        await client.initialize()
        result = await client.call_tool(tool, arguments)
    return "\n".join(block.text for block in result.content if block.type == "text"), bool(result.is_error)


def _first(group: Exception) -> Exception:
    while isinstance(group, ExceptionGroup):
        group = group.exceptions[0]
    return group


def _unreachable(url: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"{url} wants a token: give --token-file FILE (made by `toolhost tokens new`)"
    if status is not None:
        return f"{url} answers {status}: is this a toolhost, and does it serve that namespace?"
    return f"cannot reach {url} ({error or type(error).__name__}): is the host running? (toolhost serve)"
