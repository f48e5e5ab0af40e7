"""The gateway as an ASGI application of its own.

Above: the `gateway` command, other ASGI servers. Below: `routes`, `service`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toolhost import __version__
from toolhost.auth import Authenticator
from toolhost.config import Settings
from toolhost.gateway.errors import ApiError
from toolhost.gateway.http import answering, principal_of
from toolhost.gateway.routes import routes
from toolhost.gateway.service import Gateway


def create_app(gateway: Gateway, auth: Authenticator, settings: Settings) -> Starlette:
    """The application. Its lifespan opens and closes the gateway."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await gateway.open()
        try:
            yield
        finally:
            await gateway.close()

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "alive", "version": __version__})

    async def metrics(request: Request) -> Response:
        principal_of(request, auth)
        return Response(generate_latest(gateway.counts.registry), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(
        routes=[
            Route("/livez", live),
            Route("/metrics", answering(metrics)),
            *routes(gateway, auth, settings.gateway.max_body_bytes),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _on_http_error, Exception: _on_error},
    )
    app.router.redirect_slashes = False
    return app


def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "nothing is served at this path" if error.status_code == 404 else error.detail
    return JSONResponse(ApiError(error.status_code, message).as_body(), error.status_code, error.headers)


def _on_error(_: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the gateway failed; its log says why").as_body(), 500)
