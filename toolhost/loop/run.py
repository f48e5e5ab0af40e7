"""One run: its lifecycle, its control from outside, and its result.

Above: `driver.LoopDriver` and whoever follows or steers the run. Below: `rounds`, one generation at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, get_args

from openai.types.responses import ResponseError
from pydantic import ValidationError

from toolhost.loop import steps
from toolhost.loop.errors import LoopError, ModelError, RequestError, explained
from toolhost.loop.events import Emitter
from toolhost.loop.executor import Clocks, Executor
from toolhost.loop.output_items import Event
from toolhost.loop.request import LoopRequest, LoopResult, Observer
from toolhost.loop.rounds import Context, Parts, Rounds, StaleGeneration
from toolhost.loop.sessions import SessionKeeper
from toolhost.loop.steps import End
from toolhost.loop.tools import Toolbox
from toolhost.loop.trace import Trace
from toolhost.loop.transcript import Item, as_items

logger = logging.getLogger(__name__)

_ERROR_CODES = frozenset(get_args(ResponseError.model_fields["code"].annotation))
_CANCELLED = End("cancelled", "cancelled")


class LoopRun:
    """A run. Made and begun by `LoopDriver.start`; all methods are for the event loop that began it."""

    def __init__(
        self,
        request: LoopRequest,
        parts: Parts,
        clocks: Clocks,
        toolbox: Toolbox,
        choice: str,
        observer: Observer | None,
    ) -> None:
        self.response_id = request.response_id or parts.ids.new("resp")
        self._request = request
        self._parts = parts
        self._observer = observer
        self._toolbox = toolbox
        self._outbox: asyncio.Queue[Event | None] = asyncio.Queue()
        self._inbox: asyncio.Queue[Event | None] = asyncio.Queue()
        self._work: asyncio.Task[End] | None = None
        self._stopped: asyncio.Task[End] | None = None
        self._ended = False
        self._cancelled = False
        self._switches: list[list[Item]] = []
        self._trace = Trace(self.response_id, request.principal, request.model)
        self._keepers = {
            name: SessionKeeper(
                parts.tools, name, request.session or self.response_id, {**one.headers, **request.headers}
            )
            for name, one in toolbox.namespaces.items()
        }
        self._context = Context(
            request=request,
            parts=parts,
            clocks=clocks,
            toolbox=toolbox,
            choice=choice,
            emitter=Emitter(self.response_id, request.model, parts.ids, clocks.wall, _object_fields(request)),
            trace=self._trace,
            executor=Executor(
                self.response_id,
                request.principal,
                parts.ledger,
                self._keepers,
                parts.ids,
                request.limits,
                self._trace,
                clocks,
            ),
            emit=self._emit,
            checkpoint=self._checkpoint,
        )
        self._main_task: asyncio.Task[LoopResult] | None = None

    def begin(self, history: list[Item], fresh: list[Item], approvals: list[Item]) -> None:
        """Start running. Called once, by the driver. Raises RequestError for fields that no response can have."""
        try:
            self._context.emitter.snapshot()
        except ValidationError as error:
            raise explained(error) from error
        self._main_task = asyncio.create_task(self._main(history, fresh, approvals))

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events as they happen, for one reader. Closing it before the end cancels the run."""
        try:
            while (event := await self._inbox.get()) is not None:
                yield event
        finally:
            self.cancel()
            await asyncio.wait({self._started()})

    async def result(self) -> LoopResult:
        """The finished run, once its tools are cleaned up too."""
        return await asyncio.shield(self._started())

    def cancel(self) -> bool:
        """End the run as cancelled, reaching model and tools; False if it has already ended (nothing changes then)."""
        if not self._interrupt():
            return False
        self._cancelled = True
        return True

    def switch(self, new_input: str | Sequence[Mapping[str, Any]]) -> bool:
        """The user changed their mind: start the next generation with this further input.

        What the running generation still does is cancelled, and what arrives of it all the same is not delivered.
        False if the run has already ended.
        """
        items = as_items(new_input)
        if self._cancelled or not self._interrupt():
            return False
        self._switches.append(items)
        return True

    def _interrupt(self) -> bool:
        """Stop the running generation; False if it has come to its end, which then counts.

        Decided here and now, by the task's own cancel: an end and an interrupt can never both win.
        """
        if self._ended or self._started().done():
            return False
        if self._work is not None:
            if self._work.done() and not self._work.cancelled():
                return False
            self._stop(self._work)
        return True

    def _stop(self, work: asyncio.Task[End]) -> None:
        """Cancel a generation, once: a second cancel would hit what the first one has it put in order."""
        if self._stopped is not work:
            self._stopped = work
            work.cancel()

    def _started(self) -> asyncio.Task[LoopResult]:
        if self._main_task is None:
            raise LoopError("the run has not begun")
        return self._main_task

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            self._outbox.put_nowait(event)

    async def _checkpoint(self, transcript: Sequence[Item]) -> None:
        """Everything said so far is with the observer before the transcript is."""
        await self._outbox.join()
        if self._observer is not None:
            await self._observer.checkpoint(transcript)

    async def _pump(self) -> None:
        """Pass events on: to the observer as many at once as have come meanwhile, then to the reader."""
        try:
            ended = False
            while not ended:
                waiting = [await self._outbox.get()]
                while not self._outbox.empty():
                    waiting.append(self._outbox.get_nowait())
                ended = waiting[-1] is None
                events = [event for event in waiting if event is not None]
                if self._observer is not None and events:
                    await self._observer.events(events)
                for event in events:
                    self._inbox.put_nowait(event)
                for _ in waiting:
                    self._outbox.task_done()
        finally:
            self._inbox.put_nowait(None)

    async def _main(self, history: list[Item], fresh: list[Item], approvals: list[Item]) -> LoopResult:
        pump = asyncio.create_task(self._pump())
        context = self._context
        try:
            self._emit(context.emitter.begin())
            self._list_tools([*history, *fresh])
            end = await self._generations(history, fresh, approvals, pump)
            self._emit(
                context.emitter.finish(
                    end.ending, usage=context.usage.as_response_usage(), reason=end.reason, error=end.error
                )
            )
            self._outbox.put_nowait(None)
            await pump
            return await self._result(end)
        finally:
            pump.cancel()
            await self._clean_up()

    async def _generations(
        self, history: list[Item], fresh: list[Item], approvals: list[Item], pump: asyncio.Task[None]
    ) -> End:
        """Run generations until one ends; the deadline is for all of them together."""
        context, limit = self._context, self._request.limits.deadline
        deadline = None if limit is None else context.clocks.steady() + limit
        generation, items = 1, [*history, *fresh]
        while True:
            rounds = Rounds(context, generation)
            self._work = asyncio.create_task(self._guarded(rounds, items, fresh, approvals))
            if self._cancelled:
                self._stop(self._work)
            end = await self._watch(self._work, pump, deadline)
            if end is not None:
                self._ended = True
                return end
            fresh, approvals = self._switches.pop(0), []
            items = [*(context.transcript or items), *fresh]
            generation = await self._parts.ledger.switch(self.response_id)
            context.state = steps.State(tool_calls=context.state.tool_calls, output_tokens=context.state.output_tokens)
            context.pending.clear()
            self._emit(context.emitter.abort_items())
            self._trace.add("generation", context.clocks.wall(), generation=generation, input=fresh)

    async def _watch(self, work: asyncio.Task[End], pump: asyncio.Task[None], deadline: float | None) -> End | None:
        """Wait for a generation's end, or cut it short: its ending, or None if the next generation is due.

        Whoever is first here wins: an ending that is there beats a cancel, and the other way round.
        """
        left = None if deadline is None else max(0.0, deadline - self._context.clocks.steady())
        try:
            await asyncio.wait({work, pump}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                self._stop(work)
                await asyncio.wait({work})
        if pump.done():
            pump.result()
        if not work.cancelled():
            return work.result()
        if self._cancelled:
            return _CANCELLED
        if self._switches:
            return None
        limit = self._request.limits.deadline
        return End("failed", "deadline", error=("server_error", f"the deadline of {limit:g} s has passed"))

    async def _guarded(self, rounds: Rounds, items: list[Item], fresh: list[Item], approvals: list[Item]) -> End:
        """A generation's end, also when it broke: a run always ends visibly."""
        try:
            return await rounds.perform(items, fresh, approvals)
        except ModelError as error:
            code = error.code if error.code in _ERROR_CODES else "server_error"
            return End("failed", "model_error", error=(code, str(error)))
        except StaleGeneration:
            return _CANCELLED  # by someone who shares the registry: another replica, for instance
        except RequestError as error:
            return End("failed", "error", error=("invalid_prompt", str(error)))
        except Exception as error:
            if isinstance(error, ExceptionGroup) and error.subgroup(StaleGeneration) is not None:
                return _CANCELLED
            logger.exception("run %s broke", self.response_id)
            return End("failed", "error", error=("server_error", "the loop failed; its log says why"))

    def _list_tools(self, items: list[Item]) -> None:
        """Say which tools the MCP servers have, once along a conversation."""
        known = {item["server_label"] for item in items if item["type"] == "mcp_list_tools"}
        for name, namespace in self._toolbox.namespaces.items():
            if namespace.kind != "mcp" or name in known:
                continue
            item, events = self._context.emitter.tool_list(name)
            tools = [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": dict(tool.parameters),
                    "annotations": {"read_only": tool.read_only},
                }
                for tool in self._toolbox.hosted.values()
                if tool.namespace == name
            ]
            self._emit(events + (item.close(tools) if tools else item.fail("the server is not there or has no tools")))

    async def _result(self, end: End) -> LoopResult:
        context = self._context
        await context.executor.settle()
        self._trace.ending, self._trace.why = end.ending, end.why
        self._trace.calls = await self._parts.ledger.query(self.response_id)
        return LoopResult(
            context.emitter.snapshot(), tuple(context.pending), tuple(context.transcript), self._trace, end.why
        )

    async def _clean_up(self) -> None:
        waiting = any(one.kind == "function_call" for one in self._context.pending)
        if not waiting:
            await self._parts.ledger.close(self.response_id)
        await asyncio.gather(*(keeper.close() for keeper in self._keepers.values()))


def _without_secrets(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as it may be shown: headers carry credentials and session keys."""
    return {key: value for key, value in tool.items() if key not in ("headers", "authorization")}


def _object_fields(request: LoopRequest) -> dict[str, Any]:
    """The response object's fields that the request decides."""
    limits = request.limits
    chosen = {
        name: request.options[name] for name in ("temperature", "top_p", "reasoning", "text") if name in request.options
    }
    return {
        "instructions": request.instructions,
        "tools": [_without_secrets(tool) for tool in request.tools],
        "tool_choice": request.tool_choice if isinstance(request.tool_choice, str) else dict(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "max_output_tokens": limits.max_output_tokens,
        "max_tool_calls": limits.max_tool_calls,
        **chosen,
        **request.fields,
    }
