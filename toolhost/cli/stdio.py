"""`toolhost stdio`: the tools for a desktop client that starts its servers itself.

Above: the command table. Below: `config`, `services`, `transport.stdio`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sandboxes.errors import SandboxError
from toolhost import interrupts, telemetry
from toolhost.app import everything
from toolhost.cli.checks import fail
from toolhost.config import Settings, load
from toolhost.errors import ConfigurationError
from toolhost.services import StateDirectoryTaken, build
from toolhost.transport.stdio import serve_stdio

AT_ONCE = 64  # processes of one user; each has a state directory of its own, which the next one takes over


def stdio(
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings file (TOML).")] = None,
    state_dir: Annotated[str | None, typer.Option(metavar="DIR", help="As for `toolhost serve`.")] = None,
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="As for `toolhost serve`.")] = None,
) -> None:
    """Serve one MCP client over standard input and output. Its variables last as long as this process.

    For the settings of a desktop client: {"command": "toolhost", "args": ["stdio"]}.
    """
    flags = {"state_dir": state_dir, "sandbox": {"backend": backend}, "lifecycle": {"on_stop": "close"}}
    try:
        settings = load(config, flags)
        telemetry.configure(settings.log)
        interrupts.run(_serve(settings))
    except (ConfigurationError, SandboxError) as error:
        fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _serve(settings: Settings) -> None:
    search = settings.search.model_copy(update={"corpus_file": settings.corpus_file})  # one for all processes
    for number in range(AT_ONCE):
        own = {"state_dir": settings.state_dir / "stdio" / str(number), "search": search}
        services = build(settings.model_copy(update=own))
        try:
            await services.open()
        except StateDirectoryTaken:
            continue
        try:
            await serve_stdio(
                everything(services), attach=services.sessions.attach, max_calls=settings.server.max_calls
            )
        finally:
            await services.close()
        return
    raise ConfigurationError(f"{AT_ONCE} processes of `toolhost stdio` run already")
