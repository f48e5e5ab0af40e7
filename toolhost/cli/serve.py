"""`toolhost serve`: settings to a running host, and its orderly end.

Above: the command table. Below: `config`, `services`, `app`, uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn

from sandboxes.errors import SandboxError
from toolhost import interrupts, telemetry
from toolhost.app import create_app
from toolhost.cli.checks import fail
from toolhost.config import ServerSettings, Settings, load
from toolhost.errors import ConfigurationError, ToolhostError
from toolhost.services import Services, build

AT_ONCE = "toolhost: stopped at once; the next start takes over what runs"
# How long a connection may be quiet between two requests, seconds. Longer than clients and proxies keep theirs (httpx
# 5, nginx 60): who closes first must be the one that sends, else its next request meets the end of the connection.
# uvicorn's own default is httpx's.
KEEP_ALIVE_S = 75
COLLECT_AFTER = (10_000, 10, 10)  # objects, and rounds of the younger generation (gc.set_threshold)


def serve(
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to listen. Default 127.0.0.1:8000.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings file (TOML).")] = None,
    state_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Ledger, owner secret, the sandboxes' files.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, bubblewrap, docker or ray. Default auto.")
    ] = None,
    tokens_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Who may connect; see `toolhost tokens`.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve beyond this machine without tokens (a closed network only).")
    ] = False,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Time of a call. Default 120.")] = None,
    memory: Annotated[int | None, typer.Option(metavar="MIB", help="Memory of a sandbox. Default 1024.")] = None,
    max_sessions: Annotated[int | None, typer.Option(metavar="N", help="Sandboxes at once.")] = None,
    pool: Annotated[int | None, typer.Option(metavar="N", help="Warm sandboxes kept ready. Default 0.")] = None,
    root_path: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Path prefix under which a proxy serves this host.")
    ] = None,
    public_path: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Prefix for the path that clients post to, instead.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Host header to accept (again for more).")
    ] = None,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Serve /v1/responses too, over --model-url and these tools.")
    ] = False,
    model_url: Annotated[
        str | None, typer.Option("--model-url", metavar="URL", help="The gateway's model server, up to /v1.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(metavar="FORMAT", help="auto, json or text.")] = None,
) -> None:
    """Start the tool server and print what to give to vLLM.

    Settings come from these options, then TOOLHOST_GROUP__NAME variables, then --config. Ctrl-C stops in order: calls
    end, streams close, and sessions whose id the client chose or that are retained stay for the next start; their
    sandboxes end by themselves when none comes within lifecycle.fence_s (24 h). TOOLHOST_LIFECYCLE__ON_STOP=close
    closes all sessions at a stop, `toolhost sessions prune --all` those of a host that is stopped. A second Ctrl-C
    stops at once.
    """
    flags: dict[str, Any] = {
        "state_dir": state_dir,
        "server": {
            "listen": listen,
            "root_path": root_path,
            "public_path": public_path,
            "allowed_hosts": tuple(allowed_host) if allowed_host else None,
        },
        "auth": {"tokens_file": tokens_file, "insecure": insecure or None},
        "sandbox": {"backend": backend, "memory_bytes": memory << 20 if memory is not None else None},
        "python": {"timeout_s": timeout},
        "gateway": {"enabled": gateway or None, "model_url": model_url},
        "lifecycle": {"max_sessions": max_sessions, "pool": pool},
        "log": {"level": log_level, "format": log_format},
    }
    try:
        settings = load(config, flags)
        with listening(settings) as listener:
            telemetry.configure(settings.log)
            services = build(settings)
            code = launch(services, listener)
            if code == 0:
                say(what_stays(services), err=True)
    except (ToolhostError, SandboxError) as error:
        fail(error.message)
    raise typer.Exit(code)


def listening(settings: Settings) -> socket.socket:
    """The listening socket. Raises ConfigurationError: port in use, an address of another machine."""
    host, port = settings.server.address
    listener: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # IPv4 clients too
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigurationError(_cannot_listen(settings.server.listen, error)) from None
    listener.setblocking(False)
    return listener


def _cannot_listen(listen: str, error: OSError) -> str:
    host, _, port = listen.rpartition(":")
    if error.errno == errno.EADDRINUSE:
        return f"{listen} is in use by another process; give another one, for example --listen {host}:{int(port) + 1}"
    if error.errno == errno.EACCES:
        return f"not allowed to listen on {listen}; ports below 1024 need root, for example use --listen {host}:8000"
    return f"cannot listen on {listen}: {error.strerror or error}; is {host} an address of this machine?"


class HostServer(uvicorn.Server):
    """Uvicorn, with signals left to `run`: a stop first ends calls and streams, which uvicorn would wait for."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # What was made up to now stays: the collector need not look at it again, nor come with every call.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*COLLECT_AFTER)
            self._announce()


def launch(services: Services, listener: socket.socket) -> int:
    """Runs the host until it is told to stop. Returns the exit code. Raises SandboxError when it cannot start."""
    app = create_app(services)
    return run_until_stopped(
        app,
        services.settings.server,
        listener,
        opening=services.open,
        stopping=app.close,
        closing=services.close,
        started=lambda: announce(services, listener),
    )


def run_until_stopped(
    app: Any,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    opening: Callable[[], Awaitable[None]],
    stopping: Callable[[], Awaitable[None]],
    closing: Callable[[], Awaitable[None]],
    started: Callable[[], None],
) -> int:
    """Runs an application until a signal. `opening` comes before it serves, `stopping` ends what it is doing when it is
    told to stop, `closing` comes last, also after a failure. Returns the exit code."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = HostServer(config, started)

    async def run() -> int:
        stop = _Stop(asyncio.current_task(), server, stopping, settings.shutdown_s)
        loop = asyncio.get_running_loop()

        def signalled() -> None:
            loop.call_soon_threadsafe(stop.signalled)

        with interrupts.first(signalled, signal.SIGTERM, left=AT_ONCE):
            await opening()
            try:
                await server.serve(sockets=[listener])
            finally:
                await closing()
        return 0

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        try:
            return runner.run(run())
        except asyncio.CancelledError:
            return interrupts.INTERRUPTED


class _Stop:
    """The ladder of a stop: calls and streams end within a bound, then the server."""

    def __init__(
        self, task: asyncio.Task[Any] | None, server: HostServer, close: Callable[[], Any], bound_s: float
    ) -> None:
        self._task = task
        self._server = server
        self._close = close
        self._bound_s = bound_s
        self._closing: asyncio.Task[None] | None = None

    def signalled(self) -> None:
        if not self._server.started:
            assert self._task is not None
            self._task.cancel()
            return
        self._closing = asyncio.get_running_loop().create_task(self._ladder())
        say("toolhost: stopping; again to stop at once", err=True)

    async def _ladder(self) -> None:
        try:
            async with asyncio.timeout(self._bound_s):
                await self._close()
        except TimeoutError:
            say("toolhost: calls did not end in time; stopping without them", err=True)
        finally:
            self._server.should_exit = True


def announce(services: Services, listener: socket.socket) -> None:
    """What a person types next. To stdout: logs go to stderr."""
    settings = services.settings
    host, port = listener.getsockname()[:2]
    shown = _shown(host)
    address = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
    path = settings.server.public_path or settings.server.root_path
    names = [f"{address}{path}/{name}" for name in services.namespaces]
    local = "localhost" if host in ("0.0.0.0", "::") else shown
    local_address = f"[{local}]:{port}" if ":" in local else f"{local}:{port}"
    vllm_port = " --port 8001" if port == 8000 else ""  # 8000 is vLLM's own default
    lines = [
        f"toolhost listens on {address}",
        "",
        "Give this to vLLM:",
        f"  vllm serve openai/gpt-oss-20b{vllm_port} --tool-server {','.join(names)}",
        "",
        "Try it without a model (twice: the variable stays):",
        f"  toolhost call --url {local_address} --session demo \"x = globals().get('x', 0) + 1; x\"",
        "",
        "Then, against vLLM:",
        f"  curl -s http://localhost:{8001 if vllm_port else 8000}/v1/responses -H 'content-type: application/json' "
        '-d \'{"model": "openai/gpt-oss-20b", "input": "What is the 1000th prime? Use python.", '
        '"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}\'',
        f"Is this host well?  curl http://{local_address}{path}/healthz",
        "",
        *services.notices(),
    ]
    say("\n".join(lines))


def what_stays(services: Services) -> str:
    """For a person who has stopped the host: what goes on without it, for how long, and how to end it."""
    kept, settings = services.kept(), services.settings
    if not kept:
        return "toolhost: stopped; no sandbox is left"
    hours = settings.lifecycle.fence_s / 3600
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + settings.lifecycle.fence_s))
    return (
        f"toolhost: stopped; {kept} sandbox{'' if kept == 1 else 'es'} with the sessions' variables stay for the next "
        f"start, until {until} ({hours:g} h) if there is none. To end them now: toolhost sessions prune --all "
        f"--state-dir {settings.state_dir}; to have every stop end them: TOOLHOST_LIFECYCLE__ON_STOP=close"
    )


def say(text: str, *, err: bool = False) -> None:
    """Tells a person, if anybody still reads: a host goes on, and stops in order, when its output is a broken pipe."""
    try:
        typer.echo(text, err=err)
    except OSError as error:
        telemetry.unread(sys.stderr if err else sys.stdout, error)


def _shown(host: str) -> str:
    """A name that other machines can use for a bind to all addresses."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else str(host)
