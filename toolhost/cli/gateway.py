"""`toolhost gateway`: an OpenAI-compatible /v1/responses over any model server and any MCP tool servers.

Above: the command table. Below: `config`, `gateway`, `serve` (how a server runs and stops).
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from toolhost import interrupts, telemetry
from toolhost.auth import Authenticator
from toolhost.cli.checks import fail
from toolhost.cli.serve import listening, run_until_stopped
from toolhost.config import Settings, load
from toolhost.errors import ConfigurationError

LISTEN = "127.0.0.1:8080"


def gateway(
    model_url: Annotated[
        str | None, typer.Option("--model-url", metavar="URL", help="The model server, up to /v1.")
    ] = None,
    tools: Annotated[
        str | None, typer.Option(metavar="LIST", help="Comma-separated HOST:PORT/namespace, or MCP URLs.")
    ] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help=f"Where to listen. Default {LISTEN}.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model for requests that name none.")] = None,
    dialect: Annotated[
        str | None, typer.Option(metavar="NAME", help="chat, responses or anthropic. Default chat.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the model server's key.")] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="redis://HOST:PORT/0 for several gateways. Default a file.")
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keys, for reasoning that clients keep: replicas share a file that exists."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings file (TOML).")] = None,
    state_dir: Annotated[str | None, typer.Option(metavar="DIR", help="The store's file and the keys.")] = None,
    tokens_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Who may connect; see `toolhost tokens`.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve beyond this machine without tokens (a closed network only).")
    ] = False,
    log_level: Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = None,
) -> None:
    """Serve /v1/responses: history, background runs, cancel, and tools whose state follows the conversation.

    Settings come from these options, then TOOLHOST_GATEWAY__NAME variables, then [gateway] of --config.
    """
    if importlib.util.find_spec("openai") is None or importlib.util.find_spec("cryptography") is None:
        fail("the gateway needs more packages: pip install 'toolhost[gateway]'")
    flags: dict[str, Any] = {
        "state_dir": state_dir,
        "server": {"listen": listen},
        "auth": {"tokens_file": tokens_file, "insecure": insecure or None},
        "log": {"level": log_level},
        "gateway": {
            "model_url": model_url,
            "tools": tuple(part for part in tools.split(",") if part.strip()) if tools is not None else None,
            "model": model,
            "dialect": dialect,
            "api_key_file": api_key_file,
            "store": store,
            "keys_file": keys_file,
        },
    }
    try:
        settings = load(config, flags)
        if listen is None and "listen" not in settings.server.model_fields_set:
            settings = load(config, {**flags, "server": {"listen": LISTEN}})
        with listening(settings) as listener:
            telemetry.configure(settings.log)
            code = _launch(settings, listener)
    except ConfigurationError as error:
        fail(error.message)
    raise typer.Exit(code)


def _launch(settings: Settings, listener: socket.socket) -> int:
    # Here, because they load slowly and `--help` does not need them.
    from toolhost.gateway.app import create_app
    from toolhost.gateway.assembly import assemble, connect_tools
    from toolhost.gateway.stores.base import StoreError

    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # its clients log what is reported as a result here
    auth = Authenticator(settings)  # before anything else: an open bind must not start at all
    try:
        tools = interrupts.run(connect_tools(settings.gateway))
        made = assemble(settings.gateway, settings.state_dir, tools)

        async def opening() -> None:
            await made.open()
            gc.collect()
            gc.freeze()  # what is loaded stays: looking through it again would stop every stream for a while

        return run_until_stopped(
            create_app(made, auth, settings),
            settings.server,
            listener,
            opening=opening,
            stopping=made.close,
            closing=made.close,
            started=lambda: _announce(settings, listener),
        )
    except StoreError as error:
        raise ConfigurationError(str(error)) from error


def _announce(settings: Settings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = "localhost" if host in ("0.0.0.0", "::") else host
    address = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
    model = settings.gateway.model or "MODEL"
    typer.echo(
        "\n".join(
            [
                f"toolhost gateway listens on {address}, in front of {settings.gateway.model_url}",
                "",
                "Try it:",
                f"  curl -s http://{address}/v1/responses -H 'content-type: application/json' -d "
                f'\'{{"model": "{model}", "input": "What is the 1000th prime? Use python.", '
                '"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}\'',
                "",
                f"Any OpenAI client: base_url=http://{address}/v1",
            ]
        )
    )
