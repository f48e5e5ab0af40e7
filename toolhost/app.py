"""The host as an ASGI application: MCP endpoints first and directly, everything else through Starlette.

Above: commands, other ASGI servers. Below: transports, `auth`, `errors`. Made by `create_app`; no state at import.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache
from urllib.parse import urlsplit

from mcp.server.lowlevel.server import Server
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sandboxes.errors import SandboxError
from toolhost import __version__, admin, citations, files
from toolhost.config import is_loopback
from toolhost.errors import UNEXPECTED, Refused, http_for, row
from toolhost.mcp_server import create_aggregate, create_server
from toolhost.metrics import CONTENT_TYPE
from toolhost.services import Services
from toolhost.transport.asgi import Receive, Scope, Send, address_of, refuse
from toolhost.transport.http import HttpTransport
from toolhost.transport.paths import MESSAGES, local_path, parse
from toolhost.transport.sse import SseTransport

log = logging.getLogger("toolhost.app")

MODEL_PATHS = ("/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/messages")


class HostApp:
    """The ASGI application of one host."""

    def __init__(self, services: Services) -> None:
        self._services = services
        settings = services.settings
        self._prefix = settings.server.root_path
        self._known = lru_cache(maxsize=64)(self._is_known)  # every request names its host
        self._hosts = _allowed_hosts(settings.server.allowed_hosts, loopback=settings.server.loopback)
        servers = {
            name: create_server(namespace, files=services.sessions.files, traces=services.traces)
            for name, namespace in services.namespaces.items()
        }
        attach = services.sessions.attach
        self.sse = SseTransport(servers, settings=settings, auth=services.auth, attach=attach)
        self.http = HttpTransport(everything(services), servers, settings=settings, auth=services.auth, attach=attach)
        self._web = Starlette(
            routes=_routes(services),
            lifespan=self._lifespan,
            exception_handlers={Refused: _on_error, SandboxError: _on_error, HTTPException: _on_http_error},
        )
        self._web.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._web(scope, receive, send)
            return
        path = local_path(scope["path"], self._prefix or scope.get("root_path", ""))
        try:
            self._check_origin(scope["headers"])
            endpoint = parse(path)
            if endpoint is None:
                await self._web({**scope, "path": path, "root_path": ""}, receive, send)
            elif endpoint.transport == MESSAGES:
                _allow(scope, "POST")
                await self.sse.post(endpoint, scope, receive, send)
            elif endpoint.transport == "sse":
                _allow(scope, "GET")
                await self.sse.connect(endpoint, scope, receive, send)
            else:
                await self.http.handle(endpoint, scope, receive, send)
        except Refused as refused:
            await refuse(send, refused)

    async def close(self) -> None:
        """Ends calls by the ladder, so that their results still go out, then streams. Called before a server stops."""
        await self._services.close()
        await self.sse.close()
        await self.http.close()

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        await self._services.open()
        await self.http.open()
        try:
            yield
        finally:
            await self.close()

    def _check_origin(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Against DNS rebinding: a page in a browser must not reach a host on its user's machine."""
        if self._hosts is None:
            return
        for name, value in headers:
            if name == b"host" and not self._known(value.decode("latin-1")):
                raise Refused(421, "this Host header is not served here; see server.allowed_hosts")
            if name == b"origin" and not self._known(urlsplit(value.decode("latin-1")).netloc):
                raise Refused(403, "requests from this origin are not served here; see server.allowed_hosts")

    def _is_known(self, host: str) -> bool:
        assert self._hosts is not None
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower()
        return host.lower() in self._hosts or name in self._hosts or ("localhost" in self._hosts and is_loopback(name))


def create_app(services: Services) -> HostApp:
    """The application over these services. Its lifespan opens and closes them, unless that was done before."""
    return HostApp(services)


def everything(services: Services) -> Server[None]:
    """The server with the tools of every namespace."""
    return create_aggregate(list(services.namespaces.values()), files=services.sessions.files, traces=services.traces)


def _allowed_hosts(explicit: tuple[str, ...] | None, *, loopback: bool) -> frozenset[str] | None:
    if explicit is not None:
        return None if "*" in explicit else frozenset(host.lower() for host in explicit)
    return frozenset({"localhost"}) if loopback else None


def _allow(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise Refused(405, f"use {method} here", headers=(("allow", method),))


# --- what is not MCP -------------------------------------------------------------------------------------------------


def _routes(services: Services) -> list[Route]:
    async def live(_request: Request) -> Response:
        return JSONResponse({"status": "alive", "version": __version__})

    async def healthy(_request: Request) -> Response:
        """Deep: it runs code in a sandbox. The manager lets probes that come together, or soon again, share a run."""
        try:
            await services.sessions.health()
        except SandboxError as error:
            log.warning("unhealthy: %s", error.message)
            _, body, headers = http_for(error)
            return JSONResponse({"status": "unhealthy", **body}, 503, dict(headers))
        return JSONResponse({"status": "healthy", "version": __version__})

    async def metrics(request: Request) -> Response:
        services.auth.authenticate(request.scope["headers"], address_of(request.scope))
        return Response(services.metrics.render(), media_type=CONTENT_TYPE)

    shared = (services.sessions, services.auth, services.settings)
    return [
        Route("/livez", live),
        Route("/healthz", healthy),
        Route("/metrics", metrics),
        *citations.routes(*shared),
        *admin.routes(*shared),
        *files.routes(*shared),
        *_gateway_routes(services),
    ]


def _gateway_routes(services: Services) -> list[Route]:
    """/v1/responses and its kin, where the gateway is wanted; its packages are an extra."""
    if services.gateway is None:
        return []
    from toolhost.gateway.routes import routes

    return routes(services.gateway, services.auth, services.settings.gateway.max_body_bytes)


def _on_error(_request: Request, error: Exception) -> Response:
    status, body, headers = http_for(error)
    if row(error) is UNEXPECTED and not isinstance(error, Refused):
        log.error("a request failed for a reason that is not in the table of errors", exc_info=error)
    response = JSONResponse(body, status)
    for name, value in headers:
        response.headers.append(name, value)
    return response


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "nothing is served at this path" if error.status_code == 404 else error.detail
    if error.status_code == 404 and error.detail == "Not Found" and request.url.path.startswith(MODEL_PATHS):
        message = (
            "this is a tool host, not a model server: send the request to vLLM, which calls this host. Both listen on "
            "port 8000 by default: start vLLM with --port 8001, or this host with another --listen"
        )
    return JSONResponse({"error": {"code": "http", "message": message}}, error.status_code, error.headers)
