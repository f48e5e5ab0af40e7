"""Conversations that clients make, read and change themselves.

Above: `conversation_routes`. Below: `conversations`, `items`, the store. Every change is compare-and-set on the unit
and is tried again on the newer version, so that a turn that ends meanwhile is not lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolhost.gateway.conversations import Conversations, new_container
from toolhost.gateway.errors import ApiError, bad_request, not_found
from toolhost.gateway.items import checked, resolved
from toolhost.gateway.records import Item, Unit, container_key, item_key, turn_key, unit_key
from toolhost.gateway.stores.base import Change, Conflict, Put, Remove, Store
from toolhost.loop.ids import RandomIds

ATTEMPTS = 50


class Talks:
    """See the module. All methods raise ApiError 404 for what is not this principal's."""

    def __init__(self, conversations: Conversations, store: Store) -> None:
        self._conversations = conversations
        self._store = store

    async def create(self, principal: str, items: Sequence[Mapping[str, Any]], metadata: dict[str, str]) -> Unit:
        unit = Unit(
            id=f"conv_{secrets.token_hex(16)}",
            principal=principal,
            container=new_container(),
            metadata=metadata,
            created_at=int(self._conversations.clock()),
            public=True,
        )
        changes: list[Change] = []
        if items:
            complete = await self._complete(principal, items)
            _fit(complete, (), ())
            turn, changes = _turn(principal, complete)
            unit = replace(unit, turns=(turn,))
        pointer = {"principal": principal, "session": unit.container.session}
        await self._store.write(unit.put(None), Put(container_key(unit.container.id), pointer, 0), *changes)
        return unit

    async def get(self, ident: str, principal: str) -> Unit:
        return await self._conversations.get(ident, principal)

    async def update(self, ident: str, principal: str, metadata: dict[str, str]) -> Unit:
        async def changed(unit: Unit) -> Unit:
            return replace(unit, metadata=metadata)

        return await self._change(ident, principal, changed)

    async def delete(self, ident: str, principal: str) -> None:
        unit = await self.get(ident, principal)
        items = [item["id"] for item in await self._conversations.items(unit)]
        # An item that came from elsewhere, or that a client named so, is still found where it is.
        own = await self._conversations.minted(unit.turns, principal, items)
        await self._store.write(
            Remove(unit_key(ident)),
            Remove(container_key(unit.container.id)),
            *(Remove(turn_key(turn)) for turn in unit.turns),
            *(Remove(item_key(item)) for item in own),
        )

    async def add(self, ident: str, principal: str, items: Sequence[Mapping[str, Any]]) -> list[Item]:
        complete = await self._complete(principal, items)
        turn, rows = _turn(principal, complete)

        async def longer(unit: Unit) -> Unit:
            _fit(complete, await self._conversations.items(unit), unit.deleted)
            return replace(unit, turns=(*unit.turns, turn))

        await self._change(ident, principal, longer, rows)
        return complete

    async def items(self, ident: str, principal: str) -> list[Item]:
        return await self._conversations.items(await self.get(ident, principal))

    async def item(self, ident: str, principal: str, item_id: str) -> Item:
        for item in await self.items(ident, principal):
            if item["id"] == item_id:
                return item
        raise not_found("Item", item_id[:128])

    async def remove(self, ident: str, principal: str, item_id: str) -> Unit:
        async def shorter(unit: Unit) -> Unit:
            if all(item["id"] != item_id for item in await self._conversations.items(unit)):
                raise not_found("Item", item_id[:128])
            return replace(unit, deleted=(*unit.deleted, item_id))

        return await self._change(ident, principal, shorter)

    async def _complete(self, principal: str, items: Sequence[Mapping[str, Any]]) -> list[Item]:
        return await resolved(checked(items, RandomIds(), "items"), principal, self._store)

    async def _change(
        self, ident: str, principal: str, change: Callable[[Unit], Awaitable[Unit]], more: Sequence[Change] = ()
    ) -> Unit:
        for _ in range(ATTEMPTS):
            unit = await change(await self.get(ident, principal))
            try:
                await self._store.write(unit.put(None), *more)
            except Conflict as conflict:
                if conflict.key != unit_key(ident):
                    raise
                continue
            return unit
        raise ApiError(409, "too many changes of this conversation at the same moment; try again")


def _turn(principal: str, items: list[Item]) -> tuple[str, list[Change]]:
    """Items as a turn of their own: its id, and the row to write."""
    turn = f"items_{secrets.token_hex(16)}"
    data = {"principal": principal, "items": None, "client": items, "final": True}
    return turn, [Put(turn_key(turn), data, 0)]


def _fit(items: Sequence[Item], there: Sequence[Item], deleted: Sequence[str]) -> None:
    """Whether items may follow those of a conversation: what answers nothing would make every later response fail.

    Raises ApiError.
    """
    taken = {*(item["id"] for item in there), *deleted}
    calls = {item["call_id"] for item in (*there, *items) if item["type"] == "function_call"}
    requests = {item["id"] for item in (*there, *items) if item["type"] == "mcp_approval_request"}
    for number, item in enumerate(items):
        place = f"items[{number}]"
        if item["id"] in taken:
            what = f"{place}: the conversation has, or had, an item with id '{item['id']}'"
            raise bad_request(what, "items", "duplicate_item")
        taken.add(item["id"])
        if item["type"] == "function_call_output" and item["call_id"] not in calls:
            what = f"{place}: the conversation has no call '{item['call_id'][:128]}' whose output this could be"
            raise bad_request(what, "items", "invalid_value")
        if item["type"] == "mcp_approval_response" and item["approval_request_id"] not in requests:
            what = f"{place}: the conversation has no approval request '{item['approval_request_id'][:128]}'"
            raise bad_request(what, "items", "invalid_value")


def shown(unit: Unit) -> dict[str, Any]:
    """A conversation as clients see it."""
    return {"id": unit.id, "object": "conversation", "created_at": unit.created_at, "metadata": unit.metadata}
