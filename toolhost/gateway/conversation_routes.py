"""/v1/conversations and its items.

Above: `routes`. Below: `talks`, `http`, `schema`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolhost.auth import Authenticator
from toolhost.gateway.http import Json, answering, body_of, principal_of
from toolhost.gateway.pages import page
from toolhost.gateway.schema import CreateConversation, CreateItems, UpdateConversation, parse
from toolhost.gateway.service import Gateway
from toolhost.gateway.talks import Talks, shown


def routes(gateway: Gateway, auth: Authenticator, max_body_bytes: int) -> list[Route]:
    endpoints = _Endpoints(Talks(gateway.conversations, gateway.store), auth, max_body_bytes)
    one, items = "/v1/conversations/{id}", "/v1/conversations/{id}/items"
    return [
        Route("/v1/conversations", answering(endpoints.create), methods=["POST"]),
        Route(one, answering(endpoints.retrieve), methods=["GET"]),
        Route(one, answering(endpoints.update), methods=["POST"]),
        Route(one, answering(endpoints.delete), methods=["DELETE"]),
        Route(items, answering(endpoints.add_items), methods=["POST"]),
        Route(items, answering(endpoints.list_items), methods=["GET"]),
        Route(items + "/{item}", answering(endpoints.retrieve_item), methods=["GET"]),
        Route(items + "/{item}", answering(endpoints.delete_item), methods=["DELETE"]),
    ]


class _Endpoints:
    def __init__(self, talks: Talks, auth: Authenticator, max_body_bytes: int) -> None:
        self._talks = talks
        self._auth = auth
        self._limit = max_body_bytes

    def _who(self, request: Request) -> tuple[str, str]:
        return request.path_params.get("id", ""), principal_of(request, self._auth)

    async def create(self, request: Request) -> Response:
        _, principal = self._who(request)
        body = parse(CreateConversation, await body_of(request, self._limit))
        return Json(shown(await self._talks.create(principal, body.items or [], body.metadata or {})))

    async def retrieve(self, request: Request) -> Response:
        return Json(shown(await self._talks.get(*self._who(request))))

    async def update(self, request: Request) -> Response:
        ident, principal = self._who(request)
        body = parse(UpdateConversation, await body_of(request, self._limit))
        return Json(shown(await self._talks.update(ident, principal, body.metadata)))

    async def delete(self, request: Request) -> Response:
        ident, principal = self._who(request)
        await self._talks.delete(ident, principal)
        return Json({"id": ident, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, request: Request) -> Response:
        ident, principal = self._who(request)
        body = parse(CreateItems, await body_of(request, self._limit))
        items = await self._talks.add(ident, principal, body.items)
        return Json(
            {
                "object": "list",
                "data": items,
                "first_id": items[0]["id"],
                "last_id": items[-1]["id"],
                "has_more": False,
            }
        )

    async def list_items(self, request: Request) -> Response:
        return Json(page(await self._talks.items(*self._who(request)), request.query_params))

    async def retrieve_item(self, request: Request) -> Response:
        ident, principal = self._who(request)
        return Json(await self._talks.item(ident, principal, request.path_params["item"]))

    async def delete_item(self, request: Request) -> Response:
        ident, principal = self._who(request)
        return Json(shown(await self._talks.remove(ident, principal, request.path_params["item"])))
