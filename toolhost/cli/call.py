"""`toolhost call`: one tool call from a terminal, as any MCP client would make it.

Above: the command table. Below: `config`, the `mcp` SDK's client.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from toolhost import interrupts
from toolhost.admin_client import token_of, url_of
from toolhost.cli.checks import fail, secret, session_id, utf8
from toolhost.cli.printable import echo
from toolhost.config import load
from toolhost.errors import ConfigurationError

CALL_FAILED = 1
SHOWN = 1000  # characters of an answer that is an error


def call(
    text: Annotated[str, typer.Argument(help="Code for python (- reads standard input); else JSON arguments.")],
    session: Annotated[str, typer.Option(metavar="ID", help="Calls with one id share variables and files.")] = "cli",
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The tool host: HOST:PORT, or http(s)://… Default: TOOLHOST_CLIENT__URL, else where `serve` listens.",
        ),
    ] = None,
    tool: Annotated[str, typer.Option(metavar="NAMESPACE.TOOL", help="Which tool.")] = "python.python",
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with the access token, where the host wants one. Default: TOOLHOST_CLIENT__TOKEN_FILE.",
        ),
    ] = None,
) -> None:
    """Call a tool of a running host and print what a model would read.

    On a terminal, characters that would command it are left out.

    Two calls with one --session share state:

      toolhost call --session demo "x = 41"

      toolhost call --session demo "x + 1"

    Exit codes: 0 the tool answered, 1 it answered with an error, 2 no answer (the host cannot be reached, bad options).
    """
    namespace, dot, name = tool.partition(".")
    if not dot:
        name = namespace
    if text == "-":
        text = _standard_input()
    utf8(text, "the code or arguments")
    session_id(session)
    arguments = {"code": text} if name == "python" else _arguments(text)
    utf8(tool, "--tool")
    base, token = _host(url, token_file)
    headers = {"x-session-id": session}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    answer, is_error = _ask(f"{base}/{quote(namespace, safe='')}/sse", headers, name, arguments)
    echo(answer)
    raise typer.Exit(CALL_FAILED if is_error else 0)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        fail("standard input is not UTF-8 text")


def _host(url: str | None, token_file: Path | None) -> tuple[str, str | None]:
    """The host's address and its token, found as `toolhost sessions` finds them."""
    try:
        settings = load()
        base = _base(url if url is not None else url_of(settings))
        return base, secret(token_file, "token") if token_file is not None else token_of(settings)
    except ConfigurationError as error:
        fail(error.message)


def _base(url: str) -> str:
    """The host's address with its scheme, and without a slash at the end."""
    given = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(given)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or not given.isascii() or not given.isprintable() or " " in given or parts.query or parts.fragment:
        fail(f"--url takes HOST:PORT, http://HOST:PORT or https://HOST/PREFIX, not {url!r}")
    return given.rstrip("/")


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
        json.dumps(arguments, ensure_ascii=False).encode()  # as the client will have to
    except UnicodeEncodeError:
        fail("the tool's arguments have half of a surrogate pair, which is no character")
    except (ValueError, RecursionError) as error:
        fail(f'the tool\'s arguments are not JSON ({error}); for example \'{{"cmd": ["ls"]}}\'')
    if not isinstance(arguments, dict):
        fail("the tool's arguments must be a JSON object")
    return arguments


def _ask(url: str, headers: dict[str, str], tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    import httpx2
    from mcp import MCPError

    try:
        return interrupts.run(_call(url, headers, tool, arguments))
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
    from mcp.shared._httpx_utils import create_mcp_http_client

    def client_that_reads_errors(headers: Any = None, timeout: Any = None, auth: Any = None) -> Any:
        client = create_mcp_http_client(headers, timeout, auth)
        client.event_hooks = {**client.event_hooks, "response": [_read_error]}
        return client

    connecting = sse_client(url, headers=headers, httpx_client_factory=client_that_reads_errors)
    async with connecting as streams, ClientSession(*streams) as client:
        await client.initialize()
        result = await client.call_tool(tool, arguments)
    return "\n".join(block.text for block in result.content if block.type == "text"), bool(result.is_error)


async def _read_error(response: Any) -> None:
    """What is wrong stands in the answer's body, which must be read before the connection ends."""
    if response.status_code >= 400:
        await response.aread()


def _first(group: Exception) -> Exception:
    while isinstance(group, ExceptionGroup):
        group = group.exceptions[0]
    return group


def _unreachable(url: str, error: Exception) -> str:
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status == 401:
        return f"{url} wants a token: give --token-file FILE (made by `toolhost tokens new`)"
    if status is not None:
        said = " ".join("".join(c if c.isprintable() else " " for c in response.text[:SHOWN]).split())
        if said and not said.startswith("<"):
            return f"{url} answers {status}: {said}"
        return f"{url} answers {status}: is this a toolhost, and does it serve that namespace?"
    return f"cannot reach {url} ({error or type(error).__name__}): is the host running? (toolhost serve)"
