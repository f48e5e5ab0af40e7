"""One generation of a run: rounds of the model and their calls, performed until `steps` says that it ends.

Above: `run.LoopRun`, which may cancel a generation at any await. So whatever is numbered is put into the outbox before
the next await, and the transcript grows by whole rounds only: one that is cut short has an output for every call too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from toolhost.loop import steps
from toolhost.loop.approvals import ApprovalStore, PendingApproval
from toolhost.loop.call_items import CodeCall, FunctionCall, McpCall, SearchCall
from toolhost.loop.errors import LoopError, RequestError
from toolhost.loop.events import Emitter
from toolhost.loop.executor import Clocks, Executor, arguments_text, interrupted
from toolhost.loop.hooks import Annotate, Check, Refuse, ask
from toolhost.loop.ids import IdSource
from toolhost.loop.ledger import CLIENT, Attempt, CallRecord, Ledger, digest
from toolhost.loop.models.base import ModelClient, ModelRequest, Usage
from toolhost.loop.output_items import Event, OutputItem
from toolhost.loop.request import INCLUDE_CODE_OUTPUTS, LoopRequest, Pending
from toolhost.loop.results import ToolResult, excerpt
from toolhost.loop.round_reader import OpenCall, RoundReader
from toolhost.loop.steps import End, HostedCall, ModelCall, Rejected, Split
from toolhost.loop.tools import Toolbox, ToolServer, search_action
from toolhost.loop.trace import Trace
from toolhost.loop.transcript import (
    NO_RESULT,
    UNKNOWN_LABEL,
    Item,
    call_id_of,
    model_view,
    output_item,
    paired,
    turns,
)

CONFLICTING = "Two different results came in for this call, so neither is used."


class StaleGeneration(LoopError):
    """This generation may no longer deliver."""


@dataclass
class Parts:
    """What a run is made of, from the driver."""

    model: ModelClient
    tools: ToolServer
    ledger: Ledger
    approvals: ApprovalStore
    check_input: Check | None
    check_output: Check | None
    ids: IdSource
    annotate: Annotate | None = None


@dataclass
class Context:
    """What outlives a generation. `items` are the turn's items before the model's view, `transcript` is that view."""

    request: LoopRequest
    parts: Parts
    clocks: Clocks
    toolbox: Toolbox
    choice: str
    emitter: Emitter
    trace: Trace
    executor: Executor
    emit: Callable[[list[Event]], None]
    checkpoint: Callable[[Sequence[Item]], Awaitable[None]]
    transcript: list[Item] = field(default_factory=list)
    state: steps.State = field(default_factory=steps.State)
    usage: Usage = field(default_factory=Usage)
    pending: list[Pending] = field(default_factory=list)
    used_call_ids: set[str] = field(default_factory=set)
    accepted: set[str] = field(default_factory=set)

    @property
    def task(self) -> str:
        return self.emitter.response_id

    @property
    def container_id(self) -> str:
        return self.request.session or self.task


class Rounds:
    """Performs one generation."""

    def __init__(self, context: Context, generation: int) -> None:
        self._context = context
        self._parts = context.parts
        self._limits = context.request.limits
        self._generation = generation

    async def perform(self, items: list[Item], fresh: list[Item], approvals: list[Item]) -> End:
        """Run to the end. `items` is everything up to now in the client's form, `fresh` the new part of it."""
        context = self._context
        refusal = await ask(self._parts.check_input, _user_text(fresh))
        if refusal is not None:
            self._refuse(refusal)
            return End("completed", "refusal")
        self._begin_with(items)
        executed: list[Item] = []
        for one in approvals:
            if one.get("approve"):
                try:
                    await self._execute_approved(one, executed)
                finally:
                    self._begin_with([*items, *executed])
        for one in approvals:
            if not one.get("approve"):
                await self._parts.approvals.take(one["approval_request_id"], context.request.principal)
        while True:
            step = steps.plan(context.state, self._limits, context.choice)
            if isinstance(step, End):
                return step
            end = await self._round(step)
            if end is not None:
                return end

    def _begin_with(self, items: Sequence[Item]) -> None:
        context = self._context
        context.transcript = paired(model_view(items, context.toolbox.names))
        context.used_call_ids |= {one["call_id"] for one in context.transcript if one["type"] == "function_call"}

    async def _round(self, step: steps.Ask) -> End | None:
        context = self._context
        context.state = steps.asked(context.state, step)
        reader = await self._ask_model(step)
        outcome = reader.outcome()
        end = steps.after_model(context.state, outcome)
        context.state = steps.counted(context.state, outcome)
        context.usage += reader.usage
        if end is not None:
            if end.ending == "completed" and end.why == "answer" and not reader.text:
                context.emit(reader.say_nothing())
            if not outcome.calls:
                context.transcript += reader.transcript()
            return end
        parts = steps.split(outcome.calls, context.toolbox, context.state, self._limits)
        waiting = {one.call.call_id for one in parts.approval}
        # Nothing of the round is known yet, so everything that may run has an unknown outcome: should it be cut short,
        # or this process die, the next turn is told so.
        texts = {one.call.call_id: one.text for one in parts.rejected}
        before, said = context.transcript, reader.transcript(waiting)
        try:
            await self._act(parts, reader, texts, [*before, *said])
        finally:
            context.transcript = [*before, *said, *_outputs(reader, texts)]
        context.state = steps.acted(context.state, parts)
        return steps.after_calls(context.state, parts, self._limits)

    async def _ask_model(self, step: steps.Ask) -> RoundReader:
        context = self._context
        request = context.request
        wanted = 0 if not step.tools else None if request.parallel_tool_calls else 1
        reader = RoundReader(
            context.emitter,
            self._parts.ids,
            context.toolbox,
            check=self._parts.check_output,
            annotate=self._parts.annotate,
            container_id=context.container_id,
            used_call_ids=context.used_call_ids,
            calls_wanted=wanted,
        )
        entry = context.trace.add("round", context.clocks.wall(), generation=self._generation)
        started = context.clocks.steady()
        try:
            async with aclosing(self._parts.model.round(await self._model_request(step))) as deltas:
                async for delta in deltas:
                    await self._ensure_current()
                    context.emit(await reader.feed(delta))
                    if reader.refusal is not None:
                        break
            await self._ensure_current()
            context.emit(await reader.finish())
        finally:
            seconds = context.clocks.steady() - started
            context.trace.times.model += seconds
            entry |= {
                "seconds": round(seconds, 6),
                "stop": reader.stop,
                "usage": reader.usage.as_response_usage(),
                "text": reader.text,
                "calls": [
                    {"call_id": one.call_id, "name": one.name, "arguments": one.arguments} for one in reader.calls
                ],
            }
            if reader.surplus:
                entry["calls_left_out"] = reader.surplus
        return reader

    async def _model_request(self, step: steps.Ask) -> ModelRequest:
        context = self._context
        request = context.request
        tools = context.toolbox.offered(step.hosted) if step.tools else []
        choice = step.tool_choice if tools else "none"
        if choice not in ("auto", "none", "required") and choice not in {tool.name for tool in tools}:
            choice = "auto"
        return ModelRequest(
            model=request.model,
            items=await self._usable_transcript(),
            instructions=request.instructions,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=request.parallel_tool_calls,
            max_output_tokens=step.max_output_tokens,
            stream=request.stream,
            options=request.options,
        )

    async def _usable_transcript(self) -> list[Item]:
        """The transcript, without results that have been flagged since they were accepted."""
        flagged = {
            one for one in self._context.accepted if not await self._parts.ledger.usable(self._context.task, one)
        }
        return [
            output_item(one["call_id"], CONFLICTING)
            if one["type"] == "function_call_output" and one["call_id"] in flagged
            else one
            for one in paired(self._context.transcript)
        ]

    async def _act(self, parts: Split, reader: RoundReader, texts: dict[str, str], transcript: list[Item]) -> None:
        """Perform a round's calls. `texts` gets their outputs by call id, whole also if this is cut short."""
        context = self._context
        opened = {one.call_id: one for one in reader.calls}
        for rejected in parts.rejected:
            self._reject(rejected, opened[rejected.call.call_id])
        if any(not one.tool.read_only for one in parts.hosted):
            unknown = {one.call.call_id: interrupted(one) for one in parts.hosted}
            await context.checkpoint([*transcript, *_outputs(reader, texts | unknown)])
        try:
            async with asyncio.TaskGroup() as group:
                for one in parts.hosted:
                    group.create_task(self._run(one, opened[one.call.call_id], texts))
        finally:
            for one in parts.hosted:
                texts.setdefault(one.call.call_id, NO_RESULT)
        await self._ensure_current()
        for hosted in parts.approval:
            await self._request_approval(hosted, opened[hosted.call.call_id])
        for call in parts.client:
            await self._hand_over(call, opened[call.call_id])

    async def _run(self, hosted: HostedCall, opened: OpenCall, texts: dict[str, str]) -> None:
        """Run one hosted call under its item; `texts` gets what the model is given."""
        context = self._context
        item = opened.item
        if item is None:
            action = search_action(hosted.tool.name, hosted.arguments)
            item, events = context.emitter.search_call(f"ws_{opened.suffix}", action)
            context.emit(events)
        if isinstance(item, (CodeCall, SearchCall)):
            context.emit(item.run())
        try:
            result = await self._execute(hosted)
        except BaseException:
            texts[hosted.call.call_id] = self._interrupt(item, hosted)
            raise
        texts[hosted.call.call_id] = self._close(item, result)

    def _interrupt(self, item: OutputItem, hosted: HostedCall) -> str:
        """The text for a call that was cut short; its item, which the emitter will end, says the same."""
        handed_out = hosted.call.call_id in self._context.executor.handed_out
        text = interrupted(hosted) if handed_out else NO_RESULT
        if isinstance(item, (McpCall, CodeCall)):
            item.interrupt(text)
        return text

    async def _execute(self, hosted: HostedCall) -> ToolResult:
        result = await self._context.executor.run(hosted, self._generation)
        await self._ensure_current()
        if await self._parts.ledger.usable(self._context.task, hosted.call.call_id):
            self._context.accepted.add(hosted.call.call_id)
        return result

    def _close(self, item: OutputItem, result: ToolResult) -> str:
        """Close a hosted call's item with its result; the text for the model."""
        text = excerpt(result.text, self._limits.excerpt)
        match item:
            case McpCall():
                error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}
                self._context.emit(item.fail(error) if result.is_error else item.close(text))
            case CodeCall():
                outputs = self._outputs(text, result)
                self._context.emit(item.fail(outputs) if result.is_error else item.close(outputs))
            case SearchCall():
                self._context.emit(item.fail() if result.is_error else item.close())
        return text

    def _outputs(self, text: str, result: ToolResult) -> list[dict[str, Any]] | None:
        if INCLUDE_CODE_OUTPUTS not in self._context.request.include and not result.is_error:
            return None
        images = [{"type": "image", "url": url} for url in result.images]
        return [{"type": "logs", "logs": text}, *images]

    def _reject(self, rejected: Rejected, opened: OpenCall) -> None:
        """Close the item of a call that is not executed; broken calls end incomplete, the others failed."""
        context = self._context
        item = opened.item
        if item is None:
            label, name = self._label(opened.name)
            item, events = context.emitter.mcp_call(f"mcp_{opened.suffix}", label, name)
            context.emit(events + (item.write(opened.arguments) if opened.arguments else []) + item.seal())
        if rejected.why == "broken" or isinstance(item, FunctionCall):
            if isinstance(item, (McpCall, CodeCall)):
                item.interrupt(rejected.text)
            context.emit(item.abort())
        elif isinstance(item, McpCall):
            context.emit(item.fail({"type": "mcp_protocol_error", "code": -32602, "message": rejected.text}))
        elif isinstance(item, CodeCall):
            context.emit(item.fail([{"type": "logs", "logs": rejected.text}]))
        context.trace.add(
            "rejected",
            context.clocks.wall(),
            generation=self._generation,
            call_id=opened.call_id,
            name=opened.name,
            why=rejected.why,
            text=rejected.text,
        )

    def _label(self, name: str) -> tuple[str, str]:
        route = self._context.toolbox.hosted.get(name)
        return (route.namespace, route.name) if route is not None else (UNKNOWN_LABEL, name)

    async def _request_approval(self, hosted: HostedCall, opened: OpenCall) -> None:
        context = self._context
        approval_id, text = f"mcpr_{opened.suffix}", arguments_text(hosted.arguments)
        pending = PendingApproval(
            id=approval_id,
            principal=context.request.principal,
            task=context.task,
            namespace=hosted.tool.namespace,
            tool=hosted.tool.name,
            call_id=opened.call_id,
            arguments=text,
        )
        await self._parts.approvals.put(pending)
        item, events = context.emitter.approval_request(approval_id, hosted.tool.namespace, hosted.tool.name, text)
        context.emit(events + item.close())
        context.pending.append(Pending("approval", approval_id, hosted.tool.name, text, hosted.tool.namespace))

    async def _execute_approved(self, response: Item, executed: list[Item]) -> None:
        """Execute the stored call of an approval; `executed` gets the `mcp_call` item, also if it is cut short."""
        context = self._context
        approval_id = response["approval_request_id"]
        stored = await self._parts.approvals.take(approval_id, context.request.principal)
        name = context.toolbox.names.get((stored.namespace, stored.tool))
        if name is None:
            raise RequestError(f"the approved tool {stored.namespace}.{stored.tool} is not among the tools", "tools")
        arguments = steps.parse_arguments(stored.arguments)
        assert isinstance(arguments, dict)  # it was parsed before it was stored
        item_id = self._parts.ids.new("mcp")
        item, events = context.emitter.mcp_call(item_id, stored.namespace, stored.tool, approval_id)
        context.emit(events + item.write(stored.arguments) + item.seal())
        call = ModelCall(call_id_of(approval_id), name, stored.arguments)
        hosted = HostedCall(call, context.toolbox.hosted[name], arguments)
        try:
            self._close(item, await self._execute(hosted))
        except BaseException:
            self._interrupt(item, hosted)
            raise
        finally:
            executed.append(item.dump())

    async def _hand_over(self, call: ModelCall, opened: OpenCall) -> None:
        """Leave a call to the application; it is on the books before it goes out."""
        context = self._context
        arguments = steps.parse_arguments(call.arguments)
        attempt = Attempt(self._parts.ids.new("att"), 1, float("inf"))
        await self._parts.ledger.register(
            CallRecord(
                task=context.task,
                generation=self._generation,
                call_id=call.call_id,
                tool=call.name,
                arguments=digest(arguments),
                executor=CLIENT,
                principal=context.request.principal,
                attempts=(attempt,),
            )
        )
        assert isinstance(opened.item, FunctionCall)
        context.emit(opened.item.close())
        context.pending.append(Pending("function_call", call.call_id, call.name, call.arguments))

    def _refuse(self, refusal: Refuse) -> None:
        message, events = self._context.emitter.message()
        self._context.emit(events + message.refuse(refusal.reason) + message.close())

    async def _ensure_current(self) -> None:
        if not await self._parts.ledger.current(self._context.task, self._generation):
            raise StaleGeneration(f"generation {self._generation} of {self._context.task} is over")


def _outputs(reader: RoundReader, texts: Mapping[str, str]) -> list[Item]:
    """A round's outputs in call order."""
    return [output_item(one.call_id, texts[one.call_id]) for one in reader.calls if one.call_id in texts]


def _user_text(items: Sequence[Item]) -> str:
    messages = [item for item in items if item["type"] == "message" and item["role"] == "user"]
    return "\n".join(turn.text for turn in turns(messages))
