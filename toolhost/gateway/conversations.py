"""The unit of a talk: which turns came before, whose session goes on, and how a turn is added so that none is lost.

Above: `prepare`, `runs`, conversation routes. Below: the store. A chain of responses and a conversation are both a
`Unit`. The first child of a response continues its unit and keeps the session; a second one is a branch: a unit of its
own over the same turns, with a fresh session.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolhost.gateway.errors import bad_request, not_found, previous_not_found
from toolhost.gateway.records import (
    OPEN,
    Container,
    Item,
    ResponseRecord,
    Unit,
    container_key,
    item_key,
    response_key,
    turn_key,
    unit_key,
)
from toolhost.gateway.stores.base import Change, Put, Row, Store

BRANCHED = (
    "This is a second continuation of an earlier answer. Its tools have a fresh session: variables and files that were "
    "made by code before are not there."
)
EXPIRED = (
    "The session of the tools has expired since the last turn: variables and files that were made by code before are "
    "not there."
)
TOPIC_CHARACTERS = 80
UNFINISHED = ("failed", "cancelled")
"""What ended thus is not a turn of its chain, unless somebody continues from it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a new response stands. `changes` put it there and are written together with the response's row.

    `turns` are the ids of the turns before it; `note` is what the model must be told of its session.
    """

    unit: Unit
    turns: tuple[str, ...] = ()
    note: str = ""
    changes: tuple[Change, ...] = ()


@dataclass
class Conversations:
    """Reads and changes units. Times of life in seconds; `clock` gives seconds since 1970."""

    store: Store
    ttl_s: float
    session_ttl_s: float
    clock: Callable[[], float]

    # --- where a response stands -------------------------------------------------------------------------------------

    async def place(self, response_id: str, principal: str, previous: str | None, conversation: str | None) -> Place:
        """The place of a new response. Raises ApiError for a predecessor that is not there or has not ended."""
        if previous is not None:
            return await self._after(response_id, principal, previous)
        if conversation is not None:
            unit = await self.get(conversation, principal)
            renewed, note = self._renewed(unit)
            changes: tuple[Change, ...] = ()
            if renewed is not unit:
                changes = (renewed.put(self.ttl_of(unit)), _pointer(renewed, self.ttl_s))
            return Place(renewed, unit.turns, note, changes)
        return self._fresh(response_id, principal, ())

    def _fresh(self, response_id: str, principal: str, turns: tuple[str, ...], **fields: Any) -> Place:
        note = fields.pop("note", "")
        unit = Unit(
            id=f"unit_{secrets.token_hex(16)}",
            principal=principal,
            container=new_container(),
            turns=turns,
            busy=response_id,
            created_at=int(self.clock()),
            **fields,
        )
        return Place(unit, turns, note, (unit.put(self.ttl_s), _pointer(unit, self.ttl_s)))

    async def _after(self, response_id: str, principal: str, previous: str) -> Place:
        row = await self.store.get(response_key(previous))
        record = None if row is None else ResponseRecord.of(row)
        if record is None or record.principal != principal or record.unit is None:
            raise previous_not_found(previous)
        if record.status in OPEN or not record.sealed:
            raise bad_request(
                f"Response '{previous}' has not ended yet; wait for it, or cancel it.", "previous_response_id"
            )
        found = await self.store.get(unit_key(record.unit))
        if found is None:
            raise previous_not_found(previous)
        unit = Unit.of(found)
        turns = (*unit.turns[: record.position], record.id)
        kept: list[Change] = []
        if record.status in UNFINISHED and await self.store.get(turn_key(record.id)) is None:
            kept.append(_turn(record, self.ttl_s))  # a turn from now on, also when its response is deleted
        if record.status in UNFINISHED and unit.turns == turns[:-1] and not unit.public:
            unit = replace(unit, turns=turns)  # nobody else went on from before it, so its session goes on here
        if unit.turns == turns and unit.busy is None and not unit.public:
            renewed, note = self._renewed(unit)
            renewed = replace(renewed, busy=response_id)
            pointer = [] if renewed.container is unit.container else [_pointer(renewed, self.ttl_s)]
            return Place(renewed, turns, note, (renewed.put(self.ttl_s), *pointer, *kept))
        summarized = unit.summarized if unit.summarized <= len(turns) else 0
        branch = self._fresh(
            response_id,
            principal,
            turns,
            note=BRANCHED if unit.container.used_at else "",
            summary=unit.summary if summarized else "",
            summarized=summarized,
            topic=unit.topic,
        )
        return replace(branch, changes=(*branch.changes, *kept))

    def _renewed(self, unit: Unit) -> tuple[Unit, str]:
        """The unit with a session that is not over, and what to tell the model if it is another one."""
        if not unit.container.used_at or self.clock() < unit.container.expires_at:
            return unit, ""
        return replace(unit, container=new_container()), EXPIRED

    # --- what was said -----------------------------------------------------------------------------------------------

    async def history(self, unit: Unit, turns: Sequence[str]) -> list[list[Item]]:
        """The messages of turns, oldest first, one list a turn. Raises ApiError if one of them has expired."""
        rows = await self.store.get_many([turn_key(one) for one in turns])
        deleted = set(unit.deleted)
        found = [
            await self._asked(turn) if row is None else _messages(row, deleted)
            for turn, row in zip(turns, rows, strict=True)
        ]
        return _answering(found) if unit.public else found

    async def _asked(self, turn: str) -> list[Item]:
        """What is left of a turn that ended before it had said or done anything: what it was asked.

        Raises ApiError if it has expired.
        """
        row = await self.store.get(response_key(turn))
        record = None if row is None else ResponseRecord.of(row)
        if record is None or record.status not in UNFINISHED:
            raise previous_not_found(turn)
        return _asked(record)

    async def items(self, unit: Unit) -> list[Item]:
        """A conversation's items in the clients' form, oldest first."""
        rows = await self.store.get_many([turn_key(one) for one in unit.turns])
        return [
            item
            for row in rows
            if row is not None
            for item in row.data.get("client") or ()
            if item["id"] not in unit.deleted
        ]

    async def minted(self, turns: Sequence[str], principal: str, items: Sequence[str]) -> set[str]:
        """Those of the items' ids that responses among these turns have given."""
        if not turns or not items:
            return set()
        rows, inside = await self.store.get_many([item_key(one) for one in items]), set(turns)
        return {
            one
            for one, row in zip(items, rows, strict=True)
            if row is not None and row.data["principal"] == principal and row.data["in"] in inside
        }

    # --- changes -----------------------------------------------------------------------------------------------------

    async def get(self, ident: str, principal: str) -> Unit:
        """A conversation that a client made. Raises ApiError 404."""
        row = await self.store.get(unit_key(ident))
        unit = None if row is None else Unit.of(row)
        if unit is None or unit.principal != principal or not unit.public:
            raise not_found("Conversation", ident)
        return unit

    async def find(self, ident: str) -> Unit | None:
        row = await self.store.get(unit_key(ident))
        return None if row is None else Unit.of(row)

    def ttl_of(self, unit: Unit) -> float | None:
        """A conversation that a client made stays until it is deleted."""
        return None if unit.public else self.ttl_s

    def committed(self, unit: Unit, response_id: str, topic: str, usage: Mapping[str, Any] | None, used: bool) -> Put:
        """The unit with a finished turn added."""
        total = dict(unit.usage)
        for name in ("input_tokens", "output_tokens", "total_tokens"):
            total[name] = total.get(name, 0) + int((usage or {}).get(name, 0))
        new = replace(
            self.released(unit, response_id, used),
            turns=(*unit.turns, response_id),
            turn_count=unit.turn_count + 1,
            topic=unit.topic or topic[:TOPIC_CHARACTERS],
            usage=total,
        )
        return new.put(self.ttl_of(unit))

    def released(self, unit: Unit, response_id: str, used: bool) -> Unit:
        """The unit without the response that was continuing it; `used`: its session may have state."""
        container = unit.container
        if used:
            now = self.clock()
            container = replace(container, used_at=now, expires_at=now + self.session_ttl_s)
        return replace(unit, busy=None if unit.busy == response_id else unit.busy, container=container)


def new_container() -> Container:
    """A session that does not exist yet. Its key is a secret of 192 bits, its id is not."""
    return Container(f"cntr_{secrets.token_hex(16)}", f"gw.{secrets.token_urlsafe(24)}")


def _pointer(unit: Unit, ttl_s: float) -> Put:
    data = {"principal": unit.principal, "session": unit.container.session}
    return Put(container_key(unit.container.id), data, 0, ttl_s=ttl_s)


def _asked(record: ResponseRecord) -> list[Item]:
    return [item for item in record.input if item["type"] != "reasoning"]


def _turn(record: ResponseRecord, ttl_s: float) -> Put:
    """The turn of a response that ended before it had said or done anything."""
    data = {"principal": record.principal, "items": _asked(record), "client": None, "final": False}
    return Put(turn_key(record.id), data, 0, ttl_s=ttl_s)


def added(before: Sequence[Item], after: Sequence[Item]) -> list[Item]:
    """What a run added to the messages it began with: those of `after` that are not in `before`, in their order."""
    known = Counter(_canonical(item) for item in before)
    new: list[Item] = []
    for item in after:
        text = _canonical(item)
        if known[text]:
            known[text] -= 1
        else:
            new.append(item)
    return new


def _canonical(item: Item) -> str:
    return json.dumps(item, sort_keys=True)


def _messages(row: Row, deleted: set[str]) -> list[Item]:
    """A turn's messages; without those that a client deleted, from the items as the client knows them."""
    client, items = row.data.get("client"), row.data.get("items")
    if items is None or (client and any(item["id"] in deleted for item in client)):
        return [item for item in client or () if item["id"] not in deleted]
    return list(items)


def _answering(turns: list[list[Item]]) -> list[list[Item]]:
    """Turns without outputs of calls that a client has taken out: there is nothing left that they answer."""
    calls = {item["call_id"] for items in turns for item in items if item["type"] == "function_call"}
    return [
        [item for item in items if item["type"] != "function_call_output" or item["call_id"] in calls]
        for items in turns
    ]
