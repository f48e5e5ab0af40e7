"""GET /v1/models: what the model server has, passed on.

Above: routes. Below: `service`, `http`.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolhost.auth import Authenticator
from toolhost.gateway.errors import ApiError
from toolhost.gateway.http import Json, answering, principal_of
from toolhost.gateway.service import Gateway


def routes(gateway: Gateway, auth: Authenticator) -> list[Route]:
    async def listed(request: Request) -> Response:
        principal_of(request, auth)
        return Json({"object": "list", "data": await gateway.models()})

    async def one(request: Request) -> Response:
        principal_of(request, auth)
        ident: str = request.path_params["id"]
        found: list[dict[str, Any]] = [model for model in await gateway.models() if model["id"] == ident]
        if not found:
            raise ApiError(404, f"The model '{ident}' does not exist.", param="model", code="model_not_found")
        return Json(found[0])

    return [
        Route("/v1/models", answering(listed), methods=["GET"]),
        Route("/v1/models/{id:path}", answering(one), methods=["GET"]),
    ]
