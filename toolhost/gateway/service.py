"""The gateway: its parts, and what each endpoint does with them.

Above: routes, which know HTTP. Below: `runs`, `conversations`, `prepare`, the store, `toolhost.loop`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic import ValidationError

from toolhost.config import GatewaySettings
from toolhost.gateway import items as client_items
from toolhost.gateway.arrivals import Arrivals
from toolhost.gateway.citing import cite
from toolhost.gateway.conversations import Conversations, Place
from toolhost.gateway.counts import Counts
from toolhost.gateway.errors import ApiError, bad_request, not_found, of_loop
from toolhost.gateway.feed import follow
from toolhost.gateway.ledger import StoredApprovals, StoredRegistry
from toolhost.gateway.prepare import (
    Asked,
    Session,
    container_of,
    loop_request,
    object_fields,
    searches,
    stateful,
    tools_for_loop,
)
from toolhost.gateway.records import (
    OPEN,
    Item,
    ResponseRecord,
    Unit,
    container_key,
    item_key,
    lease_key,
    response_key,
    trace_key,
    turn_key,
    unit_key,
)
from toolhost.gateway.remote import RemoteServers
from toolhost.gateway.run import Keep, Run, wire_text
from toolhost.gateway.runs import Runs, current
from toolhost.gateway.schema import CreateResponse
from toolhost.gateway.sealing import Sealer
from toolhost.gateway.sources import CitationSource, FileSource, NoCitations, NoFiles
from toolhost.gateway.stores.base import Change, Conflict, Put, Remove, Store
from toolhost.gateway.taps import RunTaps, RunTools, TapModel, ToolImages
from toolhost.gateway.truncation import Fitter
from toolhost.loop.driver import LoopDriver
from toolhost.loop.errors import RequestError, explained
from toolhost.loop.events import Emitter
from toolhost.loop.hooks import Annotate
from toolhost.loop.ids import IdSource, RandomIds
from toolhost.loop.ledger import CallRegistry, Ledger, MemoryRegistry
from toolhost.loop.models.base import ModelClient
from toolhost.loop.request import LoopRequest
from toolhost.loop.tools import ToolServer, ToolServerFactory

ENCRYPTED = "reasoning.encrypted_content"
PLACING_ATTEMPTS = 20


class Catalogue(Protocol):
    """The models there are."""

    async def models(self) -> list[dict[str, Any]]:
        """As OpenAI lists them. Raises ApiError."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a gateway is made of, from its composition root. `tools` may be a factory that makes one per principal."""

    settings: GatewaySettings
    store: Store
    model: ModelClient
    tools: ToolServer | ToolServerFactory
    sealer: Sealer
    worker: str
    catalogue: Catalogue
    files: FileSource = field(default_factory=NoFiles)
    citations: CitationSource = field(default_factory=NoCitations)
    counts: Counts = field(default_factory=Counts)
    ids: IdSource = field(default_factory=RandomIds)
    clock: Callable[[], float] = time.time


class Gateway:
    """See the module. Open it before use; `close` ends what runs within a bound."""

    def __init__(self, parts: Parts) -> None:
        settings = parts.settings
        self._parts = parts
        self.store = parts.store
        self.conversations = Conversations(parts.store, settings.ttl_s, settings.session_ttl_s, parts.clock)
        self._keep = Keep(parts.store, self.conversations, settings.ttl_s, settings.lease_s)
        self._registry = StoredRegistry(parts.store, settings.ttl_s)
        self._arrivals = Arrivals(self._registry, parts.clock)
        self._approvals = StoredApprovals(parts.store, settings.ttl_s)
        self._remote = RemoteServers(settings.remote_servers)
        self._fitter = Fitter(parts.model, settings.context_tokens)
        self.runs = Runs(self._keep, parts.worker, settings.max_background, self._begin, self._resumed, parts.counts)
        self._stack = AsyncExitStack()
        self._opened = False

    @property
    def counts(self) -> Counts:
        return self._parts.counts

    @property
    def files(self) -> FileSource:
        return self._parts.files

    async def models(self) -> list[dict[str, Any]]:
        return await self._parts.catalogue.models()

    async def open(self) -> None:
        """Start what runs; once, however often it is called. Raises StoreError."""
        if self._opened:
            return
        self._opened = True
        self._stack.push_async_callback(self._parts.model.aclose)
        self._stack.push_async_callback(self.store.close)
        await self.store.open()
        await self.runs.open()
        self._stack.push_async_callback(self.runs.close)

    async def close(self) -> None:
        await self._stack.aclose()

    # --- create ------------------------------------------------------------------------------------------------------

    async def create(self, body: CreateResponse, principal: str) -> Run:
        """Take a request in and start it. Raises ApiError; nothing was started then."""
        body = await self._completed(body)
        ident = self._parts.ids.new("resp")
        fresh = await self._fresh(body, principal)
        named = await self._named_session(container_of(body.tools), principal)
        for _ in range(PLACING_ATTEMPTS):
            place = await self.conversations.place(ident, principal, body.previous_response_id, body.conversation_id)
            run = await self._run(ident, body, principal, fresh, place, named)
            try:
                if body.store:
                    await self.store.write(*self._rows(run, place))
                break
            except Conflict:
                continue  # another child was placed in between: look again
        else:
            raise ApiError(409, "too many requests continue this conversation at the same moment; try again")
        try:
            await self.runs.start(run)
        except (RequestError, ApiError) as error:
            await self._undo(run, place)
            raise of_loop(error) if isinstance(error, RequestError) else error from error
        return run

    async def _completed(self, body: CreateResponse) -> CreateResponse:
        """The body with a model, or what is wrong with it as a whole."""
        if body.previous_response_id is not None and body.conversation_id is not None:
            raise bad_request("give previous_response_id or conversation, not both", "conversation")
        if not body.store and body.background:
            raise bad_request("a background response has to be stored", "background", "invalid_value")
        if not body.store and body.conversation_id is not None:
            raise bad_request("a response in a conversation has to be stored", "store", "invalid_value")
        tools_for_loop(body.tools)
        model = body.model or self._parts.settings.model
        if not model:
            raise bad_request("name a model", "model", "missing_required_parameter")
        return body.model_copy(update={"model": model})

    async def _fresh(self, body: CreateResponse, principal: str) -> list[Item]:
        given: Sequence[Mapping[str, Any]] = body.input if isinstance(body.input, list) else []
        if isinstance(body.input, str) and body.input:
            given = [{"role": "user", "content": body.input}]
        if not given and body.previous_response_id is None and body.conversation_id is None:
            raise bad_request("input is empty", "input", "missing_required_parameter")
        items = client_items.checked(given, self._parts.ids)
        return await client_items.resolved(items, principal, self.store)

    async def _named_session(self, container: str | None, principal: str) -> Session | None:
        """The session behind a container that a request names."""
        if container is None:
            return None
        row = await self.store.get(container_key(container[:128]))
        if row is None or row.data["principal"] != principal:
            raise bad_request(f"Container with id '{container[:128]}' not found.", "tools", "container_not_found")
        return Session(container, row.data["session"])

    async def _run(
        self,
        ident: str,
        body: CreateResponse,
        principal: str,
        fresh: Sequence[Item],
        place: Place,
        named: Session | None,
    ) -> Run:
        unit, note = place.unit, place.note
        if not body.store and place.turns:
            # It is not a turn of the chain, so it takes nobody's session away: it shares the one that is there.
            found = await self.conversations.find(unit.id)
            unit = unit if found is None else found
        history = await self._history(unit, place.turns)
        here = await self.conversations.minted(place.turns, principal, [item["id"] for item in fresh])
        said = [item for turn in history for item in turn]
        fresh = client_items.once(fresh, said, here, unit.deleted, self._parts.ids)
        fresh = await self._arrivals.judged(place.turns, history, fresh)
        asked = Asked(
            id=ident,
            principal=principal,
            body=body,
            fresh=client_items.for_model(fresh, principal, self._parts.sealer),
            history=history,
            session=named or Session(unit.container.id, unit.container.session),
            note=note if named is None and stateful(body.tools) else "",
            summary=unit.summary if body.truncation == "auto" else "",
            summarized=unit.summarized,
        )
        record = ResponseRecord(
            id=ident,
            principal=principal,
            status="queued" if body.background else "in_progress",
            response=self._first_object(asked),
            input=list(fresh),
            unit=unit.id,
            position=len(place.turns),
            conversation=body.conversation_id is not None,
            request=_request(asked) if body.background else None,
            background=body.background,
        )
        return self._made(record, asked)

    async def _history(self, unit: Unit, turns: Sequence[str]) -> list[list[Item]]:
        """The messages of these turns, a list for each."""
        if not turns:
            return []
        return await self._arrivals.usable(turns, await self.conversations.history(unit, turns))

    def _made(self, record: ResponseRecord, asked: Asked) -> Run:
        return Run(record, asked, self._keep if asked.body.store else None)

    def _first_object(self, asked: Asked) -> dict[str, Any]:
        """The object before anything has happened. Raises ApiError for fields that no response can have."""
        return first_object(loop_request(asked, self._parts.settings), asked, self._parts.clock)

    def _rows(self, run: Run, place: Place) -> list[Change]:
        record = run.record
        changes: list[Change] = [record.put(self._keep.ttl_s), self.runs.lease(record.id), *place.changes]
        run.record = record.written()
        return changes

    async def _undo(self, run: Run, place: Place) -> None:
        """Take back the rows of a response that was never shown to anyone."""
        if not run.asked.body.store:
            return
        await self.store.write(Remove(response_key(run.id)), Remove(lease_key(run.id)))
        unit = await self.conversations.find(place.unit.id)
        if unit is not None and unit.busy == run.id:
            released = self.conversations.released(unit, run.id, False)
            if unit.turn_count == 0 and not unit.turns:
                await self.store.write(Remove(unit_key(unit.id)), Remove(container_key(unit.container.id)))
            else:
                await self.store.write(released.put(self.conversations.ttl_of(unit)))

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def _begin(self, run: Run) -> None:
        """Start a run's loop. Raises RequestError, ApiError."""
        asked = run.asked
        registry: CallRegistry = self._registry if asked.body.store else MemoryRegistry()
        if asked.body.store:
            self._registry.begin(run.id)
            run.done.add_done_callback(lambda _: self._registry.forget(run.id))
        images = ToolImages(registry, self._parts.settings.images)
        model = TapModel(self._parts.model, images)
        own = self._parts.tools(asked.principal) if callable(self._parts.tools) else self._parts.tools
        tools = RunTools(own, await self._remote.connect(asked.body.tools), images)
        run.asked = await self._fitter.fitted(asked)
        travels = ENCRYPTED in asked.body.include or not asked.body.store
        seal = functools.partial(self._parts.sealer.seal, asked.principal) if travels else None
        annotate: Annotate | None = None
        if asked.session is not None and searches(asked.body.tools):
            annotate = functools.partial(cite, self._parts.citations, asked.principal, asked.session.key)
        driver = LoopDriver(
            model,
            tools=tools,
            ledger=Ledger(registry),
            approvals=self._approvals,
            annotate=annotate,
            ids=self._parts.ids,
        )
        await run.begin(driver, loop_request(run.asked, self._parts.settings), RunTaps(model, images, seal))

    async def _resumed(self, record: ResponseRecord) -> Run:
        """The run of a queued response, from its rows."""
        assert record.request is not None
        body = CreateResponse.model_validate(record.request["body"])
        unit = await self.conversations.find(record.unit or "")
        if unit is None:
            raise ApiError(404, "the conversation of this response has expired")
        turns = unit.turns[: record.position]
        asked = Asked(
            id=record.id,
            principal=record.principal,
            body=body,
            fresh=client_items.for_model(record.input, record.principal, self._parts.sealer),
            history=await self._history(unit, turns),
            session=Session(*record.request["session"]) if record.request["session"] else None,
            note=record.request["note"],
            summary=unit.summary if body.truncation == "auto" else "",
            summarized=unit.summarized,
        )
        return self._made(record, asked)

    # --- what is stored ----------------------------------------------------------------------------------------------

    async def record(self, ident: str, principal: str) -> ResponseRecord:
        """A stored response. Raises ApiError 404."""
        row = await self.store.get(response_key(ident)) if len(ident) <= client_items.ID_LENGTH else None
        record = None if row is None else ResponseRecord.of(row)
        if record is None or record.principal != principal:
            raise not_found("Response", ident)
        return record

    async def retrieve(self, ident: str, principal: str) -> dict[str, Any]:
        """A response's object as it stands now."""
        record = await self.record(ident, principal)
        if record.sealed or record.status == "queued":
            return record.response
        replay = await self.runs.replay(ident)
        if record.status == "cancelled":
            return {**record.response, "output": replay.items}
        return current(record, replay)

    def events(self, ident: str, first: int) -> AsyncIterator[str]:
        """Entries of a stored response's log from number `first`, then what comes, to its end."""
        run = self.runs.get(ident)
        return run.feed.read(first) if run is not None else follow(self.store, ident, first)

    async def cancel(self, ident: str, principal: str) -> dict[str, Any]:
        record = await self.record(ident, principal)
        if not record.background:
            raise bad_request("Only a background response can be cancelled; to end another one, close its connection.")
        record = await self.runs.cancel(record)
        return record.response

    async def delete(self, ident: str, principal: str) -> None:
        """Forget a response; a running one is cancelled first. Raises ApiError 404."""
        record = await self.record(ident, principal)
        if record.status in OPEN:
            record = await self.runs.cancel(record)
        changes: list[Change] = [Remove(response_key(ident)), Remove(lease_key(ident)), Remove(trace_key(ident))]
        unit = await self.conversations.find(record.unit) if record.unit else None
        if unit is None or not unit.public:
            changes += [Remove(item_key(item["id"])) for item in record.response["output"]]
        if unit is not None and not unit.public and unit.turns[-1:] == (ident,) and unit.busy is None:
            # What others continue from stays theirs; the end of a chain goes.
            shorter = replace(unit, turns=unit.turns[:-1])
            changes += [Remove(turn_key(ident)), shorter.put(self._keep.ttl_s)]
        try:
            await self.store.write(*changes)
        except Conflict:  # the chain has just been continued
            await self.store.write(*(change for change in changes if not isinstance(change, Put)))

    async def input_items(self, ident: str, principal: str) -> list[Item]:
        return (await self.record(ident, principal)).input

    async def trace(self, ident: str, principal: str) -> dict[str, Any]:
        """What happened in a run, call by call. Raises ApiError 404."""
        await self.record(ident, principal)
        row = await self.store.get(trace_key(ident))
        if row is None:
            raise not_found("Trace", ident)
        return {**row.data, "calls": await Ledger(self._registry).query(ident)}


def _request(asked: Asked) -> dict[str, Any]:
    """What another gateway needs to begin a queued response."""
    session = asked.session
    kept = None if session is None else [session.container_id, session.key]
    return {"body": asked.body.model_dump(), "note": asked.note, "session": kept}


def first_object(request: LoopRequest, asked: Asked, clock: Callable[[], float]) -> dict[str, Any]:
    """The response's object as it is before its run begins."""
    body = asked.body
    shown: Mapping[str, Any] = {
        "instructions": body.instructions,
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        **{
            name: request.options[name]
            for name in ("temperature", "top_p", "reasoning", "text")
            if name in request.options
        },
        **object_fields(body),
    }
    try:
        response = Emitter(asked.id, request.model, RandomIds(), clock, shown).snapshot()
    except ValidationError as error:
        wrong = explained(error)
        raise bad_request(str(wrong), wrong.param, "invalid_value") from None
    data: dict[str, Any] = json.loads(wire_text(response))
    return {**data, "status": "queued"} if body.background else data
