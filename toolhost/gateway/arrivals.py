"""Outputs of client functions: they come with a later request, and are judged like every tool's result.

Above: `service`. Below: the acceptance table (`toolhost.loop.ledger`) over the gateway's store. Only calls of a stored
conversation are on record: what a client replays as items is its own to answer for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolhost.gateway.errors import bad_request
from toolhost.gateway.records import Item
from toolhost.loop.ledger import CLIENT, Arrival, CallRegistry, Ledger, Verdict, digest
from toolhost.loop.rounds import CONFLICTING
from toolhost.loop.transcript import output_item

_WHY: Mapping[Verdict, str] = {
    Verdict.CONFLICT: "another output was accepted before; now neither is used",
    Verdict.MISMATCH: "this host answers that call itself",
    Verdict.STALE: "the response that made the call is over",
    Verdict.LATE: "it came after the call's end",
}


class Arrivals:
    """See the module. `clock` gives seconds since 1970."""

    def __init__(self, registry: CallRegistry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._ledger = Ledger(registry)
        self._clock = clock

    async def judged(
        self, turns: Sequence[str], history: Sequence[Sequence[Item]], fresh: Sequence[Item]
    ) -> list[Item]:
        """The new items of a request without outputs that its history has already.

        `turns` are the ids of the responses that the history's items belong to. Raises ApiError for an output that is
        refused; the table has it then, and its verdict.
        """
        calls = {
            item["call_id"]: turn
            for turn, items in zip(turns, history, strict=True)
            for item in items
            if item["type"] == "function_call"
        }
        known = {item["call_id"] for items in history for item in items if item["type"] == "function_call_output"}
        result: list[Item] = []
        for item in fresh:
            if item["type"] == "function_call_output" and item["call_id"] in calls:
                verdict = await self._deliver(calls[item["call_id"]], item["call_id"], item["output"])
                if verdict is Verdict.DUPLICATE and item["call_id"] in known:
                    continue
                if verdict not in (None, Verdict.ACCEPTED, Verdict.DUPLICATE):
                    why = _WHY.get(verdict, "the call is not known")
                    message = f"The output of call '{item['call_id'][:128]}' is refused ({verdict}): {why}."
                    raise bad_request(message, "input", f"tool_output_{verdict}")
            result.append(item)
        return result

    async def usable(self, turns: Sequence[str], history: Sequence[Sequence[Item]]) -> list[list[Item]]:
        """A history in which outputs of clients that were contradicted since are not used."""
        calls: dict[str, str] = {}
        result: list[list[Item]] = []
        for turn, items in zip(turns, history, strict=True):
            result.append(list(await asyncio.gather(*(self._usable(calls, item) for item in items))))
            calls |= {item["call_id"]: turn for item in items if item["type"] == "function_call"}
        return result

    async def _usable(self, calls: Mapping[str, str], item: Item) -> Item:
        """`calls` are those of earlier turns: what a host's own tool said is in the turn of its call."""
        if item["type"] != "function_call_output" or item["call_id"] not in calls:
            return item
        record = await self._registry.call(calls[item["call_id"]], item["call_id"])
        return item if record is None or not record.flagged else output_item(item["call_id"], CONFLICTING)

    async def _deliver(self, task: str, call_id: str, output: Any) -> Verdict | None:
        """The verdict; None for a call that is not on record."""
        record = await self._registry.call(task, call_id)
        if record is None:
            return None
        arrival = Arrival(
            task=task,
            generation=record.generation,
            call_id=call_id,
            attempt=record.attempt.id,
            tool=record.tool,
            arguments=record.arguments,
            executor=CLIENT,
            content=digest(output),
        )
        return await self._ledger.deliver(arrival, self._clock())
