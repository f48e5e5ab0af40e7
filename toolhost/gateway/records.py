"""What the store holds of the gateway: the kinds of rows, their keys and their shapes.

Above: `runs`, `conversations`, routes. Below: `stores.base`.

| key | holds |
|---|---|
| `response/ID` | a response: its object, status and input; its log is its events |
| `lease/ID` | who runs it; due when nobody renewed it in time |
| `turn/ID` | what the turn added to the model's messages; kept out of the response so that input is stored once |
| `trace/ID` | every call of the run with its whole output; never sent to a model |
| `unit/ID` | a conversation: its turns, session, summary, counts |
| `item/ID` | which response or turn an item is in |
| `container/ID` | the session behind a `container_id` |
| `task/ID`, `attempt/ID` | the acceptance table |
| `approval/ID` | a call that waits for consent |
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from toolhost.gateway.stores.base import Put, Row

Item = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
OPEN = ("queued", "in_progress")


def response_key(ident: str) -> str:
    return f"response/{ident}"


def lease_key(ident: str) -> str:
    return f"lease/{ident}"


def turn_key(ident: str) -> str:
    return f"turn/{ident}"


def trace_key(ident: str) -> str:
    return f"trace/{ident}"


def unit_key(ident: str) -> str:
    return f"unit/{ident}"


def item_key(ident: str) -> str:
    return f"item/{ident}"


def container_key(ident: str) -> str:
    return f"container/{ident}"


def approval_key(ident: str) -> str:
    return f"approval/{ident}"


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A stored response.

    `response` is the API's object: the first one while it runs, the last one afterwards. `input` is this turn's, with
    ids. `unit` and `position`: its conversation, and how many turns of it came before. `request` is the client's body
    while the run has not begun, so that another gateway can begin it. `sealed`: its log is complete and nothing
    follows; a cancelled response is sealed by whoever ran it.
    """

    id: str
    principal: str
    status: Status
    response: dict[str, Any]
    input: list[Item] = field(default_factory=list)
    unit: str | None = None
    position: int = 0
    conversation: bool = False
    request: dict[str, Any] | None = None
    background: bool = False
    sealed: bool = False
    version: int = 0

    @classmethod
    def of(cls, row: Row) -> ResponseRecord:
        return cls(**{**row.data, "version": row.version})

    def put(self, ttl_s: float | None) -> Put:
        return Put(response_key(self.id), _data(self), self.version, ttl_s=ttl_s)

    def written(self) -> ResponseRecord:
        """The record after its `put` was written."""
        return replace(self, version=self.version + 1)


@dataclass(frozen=True, slots=True)
class Container:
    """A conversation's session with the tool host. `session` is the host's key, a secret; `id` is what clients see.

    `used_at` (seconds since 1970, 0: never) tells whether there is state, `expires_at` until when.
    """

    id: str
    session: str
    used_at: float = 0.0
    expires_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Unit:
    """A conversation: one versioned record over its turns, whose messages are rows of their own.

    `turns` are ids of turns, oldest first. `busy` is the response that continues a chain just now. `summary` stands
    for the first `summarized` turns. `deleted` are ids of items that a client took out. `public`: it was made by
    POST /v1/conversations.
    """

    id: str
    principal: str
    container: Container
    turns: tuple[str, ...] = ()
    busy: str | None = None
    summary: str = ""
    summarized: int = 0
    turn_count: int = 0
    usage: dict[str, int] = field(default_factory=dict)
    topic: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    created_at: int = 0
    deleted: tuple[str, ...] = ()
    public: bool = False
    version: int = 0

    @classmethod
    def of(cls, row: Row) -> Unit:
        data = dict(row.data)
        data["container"] = Container(**data["container"])
        data["turns"], data["deleted"] = tuple(data["turns"]), tuple(data["deleted"])
        return cls(**{**data, "version": row.version})

    def put(self, ttl_s: float | None) -> Put:
        data = {**_data(self), "container": asdict(self.container)}
        return Put(unit_key(self.id), data, self.version, ttl_s=ttl_s)


def _data(record: ResponseRecord | Unit) -> dict[str, Any]:
    """A record's fields but its version; not copied, which `asdict` would do to every item of a long answer."""
    return {one.name: getattr(record, one.name) for one in fields(record) if one.name != "version"}
