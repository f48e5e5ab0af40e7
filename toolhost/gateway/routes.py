"""The HTTP face of the gateway: /v1/responses and /v1/models; conversations are in a file of their own.

Above: `app`, the `gateway` command. Below: `service`, `http`, `schema`.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolhost.auth import Authenticator
from toolhost.gateway import conversation_routes, files, models
from toolhost.gateway.errors import bad_request
from toolhost.gateway.http import Json, answering, body_of, principal_of, sse, unless_left
from toolhost.gateway.pages import number, page
from toolhost.gateway.run import Run
from toolhost.gateway.schema import CreateResponse, parse
from toolhost.gateway.service import Gateway

HELD_S = 1.0
"""How long a stream's beginning waits for the model, which may refuse the request: then the answer is an error."""


def routes(gateway: Gateway, auth: Authenticator, max_body_bytes: int) -> list[Route]:
    """Everything under /v1 that the gateway serves."""
    endpoints = _Endpoints(gateway, auth, max_body_bytes)
    own = [
        Route("/v1/responses", answering(endpoints.create), methods=["POST"]),
        Route("/v1/responses/{id}", answering(endpoints.retrieve), methods=["GET"]),
        Route("/v1/responses/{id}", answering(endpoints.delete), methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", answering(endpoints.cancel), methods=["POST"]),
        Route("/v1/responses/{id}/input_items", answering(endpoints.input_items), methods=["GET"]),
        Route("/v1/responses/{id}/trace", answering(endpoints.trace), methods=["GET"]),
    ]
    return [
        *own,
        *conversation_routes.routes(gateway, auth, max_body_bytes),
        *models.routes(gateway, auth),
        *files.routes(gateway.store, gateway.files, auth),
    ]


class _Endpoints:
    def __init__(self, gateway: Gateway, auth: Authenticator, max_body_bytes: int) -> None:
        self._gateway = gateway
        self._auth = auth
        self._limit = max_body_bytes

    async def create(self, request: Request) -> Response:
        principal = principal_of(request, self._auth)
        body = parse(CreateResponse, await body_of(request, self._limit))
        run = await self._gateway.create(body, principal)
        if body.background:
            return sse(run.feed.read()) if body.stream else Json(run.record.response)
        leave = _leaving(run)
        if not body.stream:
            response = await unless_left(request, run.done, leave)
            if (refused := run.refused()) is not None:
                raise refused
            return Json(response)
        await unless_left(request, run.heard(HELD_S), leave)
        if (refused := run.refused()) is not None:
            raise refused
        return sse(run.feed.read(), leave)

    async def retrieve(self, request: Request) -> Response:
        principal, ident = principal_of(request, self._auth), request.path_params["id"]
        if request.query_params.get("stream") not in ("true", "True", "1"):
            if "starting_after" in request.query_params:
                raise bad_request("starting_after needs stream=true", "starting_after", "invalid_value")
            return Json(await self._gateway.retrieve(ident, principal))
        after = number(request.query_params, "starting_after", -1)
        if after < -1:
            raise bad_request("starting_after must be 0 or more", "starting_after", "invalid_value")
        await self._gateway.record(ident, principal)
        return sse(self._gateway.events(ident, after + 1))

    async def delete(self, request: Request) -> Response:
        ident = request.path_params["id"]
        await self._gateway.delete(ident, principal_of(request, self._auth))
        return Json({"id": ident, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        principal = principal_of(request, self._auth)
        return Json(await self._gateway.cancel(request.path_params["id"], principal))

    async def input_items(self, request: Request) -> Response:
        principal = principal_of(request, self._auth)
        items = await self._gateway.input_items(request.path_params["id"], principal)
        return Json(page(items, request.query_params))

    async def trace(self, request: Request) -> Response:
        principal = principal_of(request, self._auth)
        return Json(await self._gateway.trace(request.path_params["id"], principal))


def _leaving(run: Run) -> Any:
    """What the end of a connection does to a foreground response: nobody is left to hear it."""

    def leave() -> None:
        if not run.done.done():
            run.cancel()

    return leave
