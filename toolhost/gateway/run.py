"""One response being run in this process: an observer of the loop that stores everything before anyone sees it.

Above: `runs`. Below: `toolhost.loop`, `conversations`, the store. Who wins between an end and a cancel is decided by
the store's compare-and-set on the response's row, never here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic_core import PydanticSerializationError

from toolhost.gateway.conversations import Conversations, added
from toolhost.gateway.errors import ApiError, of_model
from toolhost.gateway.feed import Feed, entry
from toolhost.gateway.prepare import STATEFUL, Asked, summarized
from toolhost.gateway.records import (
    OPEN,
    Item,
    ResponseRecord,
    Status,
    Unit,
    item_key,
    lease_key,
    response_key,
    trace_key,
    turn_key,
    unit_key,
)
from toolhost.gateway.replay import DELTAS, TERMINAL, Replay
from toolhost.gateway.stores.base import Append, Change, Check, Conflict, Put, Remove, Store, StoreError
from toolhost.loop.driver import LoopDriver
from toolhost.loop.errors import LoopError, ModelError
from toolhost.loop.events import wire_json
from toolhost.loop.output_items import Event
from toolhost.loop.request import LoopRequest, LoopResult
from toolhost.loop.run import LoopRun

log = logging.getLogger("toolhost.gateway")

PATIENCE_S = 0.005
"""How long further text may wait for the store, to be written together with that of other responses."""
STOPPED = "the gateway that ran this response stopped before its end"
_ITEMS = frozenset({"response.output_item.added", "response.output_item.done"})
_OBJECTS = frozenset({"response.created", "response.in_progress", *TERMINAL})


class Superseded(LoopError):
    """Another process has ended this response: nothing of this run counts any more."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How a run's rows are kept: `ttl_s` seconds after their last change; a lease for `lease_s` seconds."""

    store: Store
    conversations: Conversations
    ttl_s: float
    lease_s: float


class Taps(Protocol):
    """What a run knows beside the loop's events."""

    def dressed(self, item: Item) -> Item:
        """An output item completed for the client (sealed reasoning)."""
        ...

    async def shown(self, items: Sequence[Item]) -> list[Item]:
        """Messages as the model was really shown them (images of tools)."""
        ...

    @property
    def answered(self) -> asyncio.Event:
        """Set once the model has begun its first answer, or has refused to."""
        ...

    @property
    def refusal(self) -> ModelError | None:
        """Why it has refused to."""
        ...


class Run:
    """A response in this process. `keep` None: store=false, nothing of it is kept.

    `done` is set with the final object once everything is stored.
    """

    def __init__(self, record: ResponseRecord, asked: Asked, keep: Keep | None) -> None:
        self.record = record
        self.asked = asked
        self.feed = Feed()
        self.done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.lease_version = 1
        self.cancelled = False
        self.begun = False
        self._keep = keep
        self._loop_run: LoopRun | None = None
        self._terminal: str | None = None
        self._turn_version = 0
        self._before = [item for turn in asked.history for item in turn]
        self._taps: Taps | None = None

    @property
    def id(self) -> str:
        return self.record.id

    # --- life --------------------------------------------------------------------------------------------------------

    async def begin(self, driver: LoopDriver, request: LoopRequest, taps: Taps) -> None:
        """Start the loop. Raises RequestError: nothing was started."""
        self._taps = taps
        self._loop_run = await driver.start(request, self)
        self.begun = True
        if self.cancelled:
            self._loop_run.cancel()

    async def finish(self) -> None:
        """Wait for the loop's end and store it. Never raises: what goes wrong ends the response visibly."""
        assert self._loop_run is not None
        try:
            await self._end(await self._loop_run.result())
        except Superseded:
            await self._adopt_end()
        except Exception:
            log.exception("response %s broke", self.id)
            await self.fail("the gateway failed; its log says why")
        finally:
            self.feed.end()

    def cancel(self) -> None:
        """End the run as cancelled; the model and the tools are reached by the loop."""
        self.cancelled = True
        if self._loop_run is not None:
            self._loop_run.cancel()

    async def heard(self, most_s: float) -> None:
        """Wait for the model's first word, for so long at most; if it refuses, for the end."""
        assert self._taps is not None
        waiting: asyncio.Future[Any] = asyncio.ensure_future(self._taps.answered.wait())
        ended: asyncio.Future[Any] = self.done
        await asyncio.wait({waiting, ended}, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._taps.refusal is not None:
            await asyncio.wait({self.done})

    def refused(self) -> ApiError | None:
        """The client's mistake for which the model server refused the request before anything had happened."""
        refusal = None if self._taps is None else self._taps.refusal
        if refusal is None or not self.done.done():
            return None
        response = self.done.result()
        if response["status"] != "failed" or any(item["type"] != "mcp_list_tools" for item in response["output"]):
            return None
        return of_model(refusal)

    async def look(self) -> None:
        """Look whether another process has changed the row; called when one may have."""
        if self._keep is None or self.done.done():
            return
        row = await self._keep.store.get(response_key(self.id))
        # By its status, not its version: this run may be writing the row at this very moment.
        if row is None or row.data["status"] not in OPEN:
            self.cancel()
            if not self.begun:  # it waits for its turn, which need not come any more
                await self._adopt_end()
                self.feed.end()

    # --- the loop's observer -----------------------------------------------------------------------------------------

    async def events(self, events: Sequence[Event]) -> None:
        lines = [self._line(event) for event in events if event.type not in TERMINAL]
        if events[-1].type in TERMINAL:
            self._terminal = self._line(events[-1])  # it is stored with all that the ending brings, in `finish`
        if not lines:
            return
        if self._keep is not None:
            patience_s = PATIENCE_S if all(event.type in DELTAS for event in events) else 0.0
            await self._store(Append(response_key(self.id), len(self.feed), lines), patience_s)
        self.feed.add(*lines)

    async def checkpoint(self, transcript: Sequence[Item]) -> None:
        if self._keep is None:
            return
        data = {"items": self._added(list(transcript)), "client": None, "final": False}
        await self._store(Put(turn_key(self.id), data, self._turn_version, ttl_s=self._keep.ttl_s))
        self._turn_version += 1
        # A cancel that was found out while storing must come before the tool, not after it.
        await asyncio.sleep(0)

    async def _store(self, change: Change, patience_s: float = 0.0) -> None:
        """Write for as long as this run owns the response. A cancelled run still closes its items."""
        assert self._keep is not None
        status_before = self.record.status
        while True:
            changes: list[Change] = [Check(response_key(self.id), self.record.version), change]
            if self.record.status == "queued":
                changes[0] = replace(self.record, status="in_progress", request=None).put(self._keep.ttl_s)
            try:
                await self._keep.store.write(*changes, patience_s=patience_s)
            except Conflict as conflict:
                if conflict.key != response_key(self.id) or not await self._reload():
                    raise Superseded(f"{self.id} was ended by another gateway") from conflict
                continue
            if status_before == "queued" and self.record.status == "queued":
                self.record = replace(self.record, status="in_progress", request=None).written()
            return

    async def _reload(self) -> bool:
        """Read the row again after somebody wrote it; whether this run still has to close it."""
        assert self._keep is not None
        row = await self._keep.store.get(response_key(self.id))
        if row is None:
            self.cancel()
            return False
        self.record = ResponseRecord.of(row)
        if self.record.sealed or self.record.status not in ("in_progress", "queued", "cancelled"):
            self.cancel()
            return False
        if self.record.status == "cancelled":
            self.cancel()
        return True

    def _line(self, event: Event) -> str:
        """An event as it is stored and sent."""
        text = wire_text(event)
        if event.type in _ITEMS and event.item.type == "reasoning":
            data = json.loads(text)
            data["item"] = self._dressed(data["item"])
        elif event.type in _OBJECTS:
            data = json.loads(text)
            data["response"] = self._object(data["response"])
        else:
            return entry(event.type, text)
        return entry(event.type, json.dumps(data, separators=(",", ":")))

    def _dressed(self, item: Item) -> Item:
        return item if self._taps is None else self._taps.dressed(item)

    def _object(self, response: dict[str, Any]) -> dict[str, Any]:
        """The loop's object as the client's: one time of creation, whenever the run began."""
        output = [self._dressed(item) for item in response["output"]]
        return {**response, "created_at": self.record.response["created_at"], "output": output}

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _end(self, result: LoopResult) -> None:
        response = self._object(json.loads(wire_text(result.response)))
        if self._keep is None:
            self._publish_end(response)
            return
        while True:
            stored = self.record.status == "cancelled" or response["status"] == "cancelled"
            status: Status = "cancelled" if stored else response["status"]
            response = {**response, "status": status, **(_CANCELLED if stored else {})}
            if stored:
                self._terminal = None
            record = replace(self.record, status=status, response=response, sealed=True, request=None)
            try:
                await self._keep.store.write(*await self._ending(record, result))
            except Conflict as conflict:
                if conflict.key == response_key(self.id) and not await self._reload():
                    raise Superseded(f"{self.id} was ended by another gateway") from conflict
                if conflict.key not in (response_key(self.id), unit_key(self.record.unit or "")):
                    raise
                continue
            self.record = record.written()
            self._publish_end(response)
            return

    async def _ending(self, record: ResponseRecord, result: LoopResult) -> list[Change]:
        """All that an ending changes, to be written at once."""
        assert self._keep is not None
        keep, ended_well = self._keep, record.status in ("completed", "incomplete")
        changes: list[Change] = [record.put(keep.ttl_s), Remove(lease_key(self.id))]
        if self._terminal is not None:
            changes.append(Append(response_key(self.id), len(self.feed), [self._terminal]))
        unit = await keep.conversations.find(record.unit) if record.unit else None
        ttl_s = keep.ttl_s if unit is None or not unit.public else None
        items = [*record.input, *record.response["output"]]
        transcript = self._added(list(result.transcript))
        if self._taps is not None:
            transcript = await self._taps.shown(transcript)
        turn = {
            "principal": record.principal,
            "items": [*_lists(record.response["output"]), *transcript],
            "client": items if unit is not None and unit.public else None,
            "final": True,
        }
        changes.append(Put(turn_key(self.id), turn, self._turn_version, ttl_s=ttl_s))
        changes.append(Put(trace_key(self.id), result.trace.as_data(), 0, ttl_s=keep.ttl_s))
        changes += [self._pointer(item, unit) for item in record.response["output"]]
        if unit is not None:
            changes.append(self._unit(unit, record, result, ended_well))
        return changes

    def _pointer(self, item: Item, unit: Unit | None) -> Put:
        in_turn = unit is not None and unit.public
        data = {"principal": self.record.principal, "in": self.id, "kind": "turn" if in_turn else "response"}
        ttl_s = None if in_turn or self._keep is None else self._keep.ttl_s
        return Put(item_key(item["id"]), data, 0, ttl_s=ttl_s)

    def _unit(self, unit: Unit, record: ResponseRecord, result: LoopResult, ended_well: bool) -> Put:
        assert self._keep is not None
        conversations = self._keep.conversations
        used = any(
            one["kind"] == "call" and str(one.get("tool", "")).partition(".")[0] in STATEFUL
            for one in result.trace.entries
        )
        if self.asked.summary and self.asked.body.truncation == "auto":
            dropped = record.position - len(self.asked.history)
            if dropped > unit.summarized:
                unit = replace(unit, summary=self.asked.summary, summarized=dropped)
        if not ended_well:
            return conversations.released(unit, self.id, used).put(conversations.ttl_of(unit))
        return conversations.committed(unit, self.id, _first_text(record.input), record.response.get("usage"), used)

    def _added(self, transcript: list[Item]) -> list[Item]:
        return added([*self._before, *summarized(self.asked.summary)], transcript)

    def _publish_end(self, response: dict[str, Any]) -> None:
        if self._terminal is not None and response["status"] != "cancelled":
            self.feed.add(self._terminal)
        self.feed.end()
        if not self.done.done():
            self.done.set_result(response)

    async def _adopt_end(self) -> None:
        """The response's end came from elsewhere: show what the store says."""
        assert self._keep is not None
        row = await self._keep.store.get(response_key(self.id))
        response = self.record.response if row is None else row.data["response"]
        lines = await self._keep.store.entries(response_key(self.id), len(self.feed))
        self.feed.add(*lines)
        if not self.done.done():
            self.done.set_result(response)

    async def fail(self, message: str, code: str = "server_error") -> None:
        """End the response as failed, here and in the store. Never raises."""
        if self.done.done():
            return
        replay = Replay.of(json.loads(line.partition(" ")[2]) for line in self.feed.entries)
        lines, response = failing(replay, self.record, message, code)
        try:
            if self._keep is not None:
                await self._keep.store.write(*await self._failure(response, lines))
        except Conflict:
            await self._adopt_end()
            return
        except StoreError as error:
            # Whoever listens hears of it now; the reconciler writes the same once the store is back.
            log.error("the end of response %s cannot be stored: %s", self.id, error)
        self.feed.add(*lines)
        self.feed.end()
        self.done.set_result(response)

    async def _failure(self, response: dict[str, Any], lines: list[str]) -> list[Change]:
        assert self._keep is not None
        keep = self._keep
        record = replace(self.record, status="failed", response=response, sealed=True, request=None)
        changes: list[Change] = [
            record.put(keep.ttl_s),
            Append(response_key(self.id), len(self.feed), lines),
            Remove(lease_key(self.id)),
        ]
        unit = await keep.conversations.find(record.unit) if record.unit else None
        if unit is not None and unit.busy == self.id:
            released = keep.conversations.released(unit, self.id, self._turn_version > 0)
            changes.append(released.put(keep.conversations.ttl_of(unit)))
        return changes


_CANCELLED: dict[str, Any] = {"completed_at": None, "error": None, "incomplete_details": None}


def failing(
    replay: Replay, record: ResponseRecord, message: str, code: str = "server_error"
) -> tuple[list[str], dict[str, Any]]:
    """The entries that end a log as failed, and the response's last object."""
    events: list[dict[str, Any]] = []
    if not replay.began:
        first = {**record.response, "status": "in_progress"}
        events = [
            {"type": "response.created", "response": first},
            {"type": "response.in_progress", "response": first},
        ]
    closing = replay.closing()
    for event in closing:
        replay.add(event)
    response = {
        **record.response,
        "status": "failed",
        "error": {"code": code, "message": message},
        "output": replay.items,
        "completed_at": None,
    }
    events += [*closing, {"type": "response.failed", "response": response}]
    start = replay.count - len(closing)
    for number, event in enumerate(events, start):
        event["sequence_number"] = number
    return [entry(event["type"], json.dumps(event)) for event in events], response


def queued(record: ResponseRecord) -> str:
    """The one entry in the log of a response that ends before it began: whoever follows it learns what it was."""
    created = {"type": "response.created", "response": record.response, "sequence_number": 0}
    return entry("response.created", json.dumps(created))


def sealing(replay: Replay) -> tuple[list[str], list[Item]]:
    """The entries that end a cancelled log, and the output."""
    closing = replay.closing()
    for event in closing:
        replay.add(event)
    return [entry(event["type"], json.dumps(event)) for event in closing], replay.items


def wire_text(value: Any) -> str:
    """An event or object as JSON. Half of a surrogate pair, which models do send, stays as its escape."""
    try:
        return wire_json(value)
    except PydanticSerializationError:
        return json.dumps(value.model_dump(by_alias=True, exclude_unset=True))


def _lists(output: Sequence[Item]) -> list[Item]:
    """Which servers' tools the client has been shown: they are not listed again along the chain."""
    return [
        {"type": "mcp_list_tools", "server_label": item["server_label"]}
        for item in output
        if item["type"] == "mcp_list_tools" and not item.get("error")
    ]


def _first_text(items: Sequence[Item]) -> str:
    for item in items:
        if item["type"] == "message" and item["role"] == "user":
            return " ".join(part["text"] for part in item["content"] if isinstance(part.get("text"), str))
    return ""
