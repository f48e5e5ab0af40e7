"""Runs one hosted call: registered before, judged after, tried again only where that is safe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolhost.loop.errors import ToolError, ToolServerGone
from toolhost.loop.ids import IdSource
from toolhost.loop.ledger import Arrival, Attempt, CallRecord, Ledger, Verdict, digest
from toolhost.loop.request import Limits
from toolhost.loop.results import ToolResult
from toolhost.loop.sessions import SessionKeeper
from toolhost.loop.steps import HostedCall
from toolhost.loop.tools import HostedTool
from toolhost.loop.trace import Trace
from toolhost.loop.transcript import OUTCOME_UNKNOWN

READ_LOST = "No result of this call came; asking again would do no harm."
_LINGER_SECONDS = 5.0
"""How long a cancelled call may still hand in a result, for the record."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """`wall` gives seconds since 1970, `steady` seconds for measuring."""

    wall: Callable[[], float]
    steady: Callable[[], float]


class Executor:
    """Executes the hosted calls of one task."""

    def __init__(
        self,
        task: str,
        principal: str,
        ledger: Ledger,
        keepers: Mapping[str, SessionKeeper],
        ids: IdSource,
        limits: Limits,
        trace: Trace,
        clocks: Clocks,
    ) -> None:
        self._task = task
        self._principal = principal
        self._ledger = ledger
        self._keepers = keepers
        self._ids = ids
        self._limits = limits
        self._trace = trace
        self._clocks = clocks
        self._lingering: set[asyncio.Task[None]] = set()
        self.handed_out: set[str] = set()
        """The calls of which at least one attempt was begun."""

    async def run(self, hosted: HostedCall, generation: int) -> ToolResult:
        """The call's one terminal result. Only a result that the ledger accepted is passed on as such."""
        entry = self._trace.add(
            "call",
            self._clocks.wall(),
            generation=generation,
            call_id=hosted.call.call_id,
            tool=hosted.tool.key,
            arguments=hosted.arguments,
            attempts=[],
        )
        asked = self._clocks.steady()
        async with self._keepers[hosted.tool.namespace].lock:
            queued = self._clocks.steady() - asked
            self._trace.times.queue += queued
            entry["queue_seconds"] = round(queued, 6)
            result = await self._attempts(hosted, generation, entry)
        entry["output"] = result.text
        entry["is_error"] = result.is_error
        if result.receipt:
            entry["receipt"] = dict(result.receipt)
        return result

    async def settle(self) -> None:
        """Wait, within bounds, for cancelled calls that have not ended yet."""
        if self._lingering:
            await asyncio.wait(self._lingering, timeout=_LINGER_SECONDS + 1)

    async def _attempts(self, hosted: HostedCall, generation: int, entry: dict[str, Any]) -> ToolResult:
        attempt = await self._register(hosted, generation)
        while True:
            entry["attempts"].append(attempt)
            try:
                return await self._attempt(hosted, generation, attempt, entry)
            except ToolServerGone as error:
                await self._ledger.end(self._task, hosted.call.call_id, attempt, "lost")
                attempt = await self._next_attempt(hosted, len(entry["attempts"]))
                if not attempt:
                    await self._ledger.give_up(self._task, hosted.call.call_id)
                    entry["terminal"] = "lost"
                    return ToolResult(f"{error}. {interrupted(hosted)}", is_error=True)

    async def _register(self, hosted: HostedCall, generation: int) -> str:
        attempt = Attempt(self._ids.new("att"), 1, self._clocks.wall() + self._limits.call_timeout)
        await self._ledger.register(
            CallRecord(
                task=self._task,
                generation=generation,
                call_id=hosted.call.call_id,
                tool=hosted.tool.key,
                arguments=digest(hosted.arguments),
                executor=hosted.tool.namespace,
                principal=self._principal,
                attempts=(attempt,),
            )
        )
        return attempt.id

    async def _next_attempt(self, hosted: HostedCall, so_far: int) -> str:
        """A further attempt's id, or "" where trying again is not safe or not allowed."""
        if so_far >= self._limits.max_attempts or not may_repeat(hosted.tool, hosted.arguments):
            return ""
        attempt, deadline = self._ids.new("att"), self._clocks.wall() + self._limits.call_timeout
        opened = await self._ledger.retry(self._task, hosted.call.call_id, attempt, deadline)
        return attempt if opened else ""

    async def _attempt(self, hosted: HostedCall, generation: int, attempt: str, entry: dict[str, Any]) -> ToolResult:
        keeper = self._keepers[hosted.tool.namespace]
        self.handed_out.add(hosted.call.call_id)
        started = self._clocks.steady()
        work = asyncio.create_task(keeper.call(hosted.tool.name, hosted.arguments, attempt))
        try:
            done, _ = await asyncio.wait({work}, timeout=self._limits.call_timeout)
        except asyncio.CancelledError:
            self._abandon(work, hosted, generation, attempt)
            await self._ledger.end(self._task, hosted.call.call_id, attempt, "cancelled")
            entry["terminal"] = "cancelled"
            raise
        finally:
            seconds = self._clocks.steady() - started
            self._trace.times.tool += seconds
            entry["tool_seconds"] = round(entry.get("tool_seconds", 0.0) + seconds, 6)
        if not done:
            return await self._timed_out(work, hosted, generation, attempt, entry)
        try:
            result = work.result()
        except ToolServerGone:
            raise
        except ToolError as error:
            result = ToolResult(str(error), is_error=True)
        return await self._accept(result, hosted, generation, attempt, entry)

    async def _accept(
        self, result: ToolResult, hosted: HostedCall, generation: int, attempt: str, entry: dict[str, Any]
    ) -> ToolResult:
        verdict = await self._judge(result, hosted, generation, attempt)
        if verdict is Verdict.ACCEPTED:
            entry["terminal"] = "result"
            return result
        entry["terminal"] = "timeout" if verdict is Verdict.LATE else str(verdict)
        entry["refused_output"] = result.text
        if verdict is Verdict.LATE:
            return self._timeout_text(hosted)
        return ToolResult(f"The result of this call was not accepted ({verdict}).", is_error=True)

    async def _timed_out(
        self, work: asyncio.Task[ToolResult], hosted: HostedCall, generation: int, attempt: str, entry: dict[str, Any]
    ) -> ToolResult:
        await self._ledger.end(self._task, hosted.call.call_id, attempt, "timeout")
        entry["terminal"] = "timeout"
        self._abandon(work, hosted, generation, attempt)
        return self._timeout_text(hosted)

    def _timeout_text(self, hosted: HostedCall) -> ToolResult:
        seconds = f"{self._limits.call_timeout:g}"
        text = f"The call did not end within {seconds} s and was given up. {interrupted(hosted)}"
        return ToolResult(text, is_error=True)

    async def _judge(self, result: ToolResult, hosted: HostedCall, generation: int, attempt: str) -> Verdict:
        before = self._clocks.steady()
        arrival = Arrival(
            task=self._task,
            generation=generation,
            call_id=hosted.call.call_id,
            attempt=attempt,
            tool=hosted.tool.key,
            arguments=digest(hosted.arguments),
            executor=hosted.tool.namespace,
            content=digest(result.as_data()),
        )
        verdict = await self._ledger.deliver(arrival, self._clocks.wall())
        self._trace.times.acceptance += self._clocks.steady() - before
        return verdict

    def _abandon(self, work: asyncio.Task[ToolResult], hosted: HostedCall, generation: int, attempt: str) -> None:
        """Cancel a call, and record what it hands in all the same."""
        work.cancel()
        task = asyncio.create_task(self._record_stray(work, hosted, generation, attempt))
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def _record_stray(
        self, work: asyncio.Task[ToolResult], hosted: HostedCall, generation: int, attempt: str
    ) -> None:
        done, _ = await asyncio.wait({work}, timeout=_LINGER_SECONDS)
        if not done or work.cancelled() or work.exception() is not None:
            return
        result = work.result()
        verdict = await self._judge(result, hosted, generation, attempt)
        self._trace.add(
            "refused_result",
            self._clocks.wall(),
            generation=generation,
            call_id=hosted.call.call_id,
            attempt=attempt,
            verdict=str(verdict),
            output=result.text,
        )


def interrupted(hosted: HostedCall) -> str:
    """What a model must know of a call that was handed out and whose result never came."""
    return READ_LOST if may_repeat(hosted.tool, hosted.arguments) else OUTCOME_UNKNOWN


def may_repeat(tool: HostedTool, arguments: Mapping[str, Any]) -> bool:
    """Whether asking again cannot do harm: the tool only reads, or the service knows the operation by its key."""
    return tool.read_only or bool(tool.operation_key and arguments.get(tool.operation_key))


def arguments_text(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)
