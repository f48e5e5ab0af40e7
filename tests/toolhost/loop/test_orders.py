"""The order example: one user changes their mind, another asks for what is not theirs, and a reply gets lost.

The shop is a tool server in the same process, made for one principal by a factory: who asks comes from the caller,
never from the model. It is stubborn, as business services are: a query that was cancelled still answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.toolhost.loop.checks import check_stream
from tests.toolhost.loop.conftest import MakeLoop
from toolhost.loop.errors import ToolServerGone
from toolhost.loop.ledger import Verdict, digest
from toolhost.loop.request import Limits, LoopRequest
from toolhost.loop.tool_client import NamespaceDescription, ToolDescription

REFUSED = "There is no such order for you."
SCHEMA = {"type": "object", "properties": {"order": {"type": "string"}}}
ORDERS = {"type": "mcp", "server_label": "orders", "require_approval": "never"}


@dataclass
class Shop:
    """The business: orders with their owners, operations by their keys, and a switch that loses a reply."""

    owners: dict[str, str] = field(default_factory=lambda: {"A": "ann", "B": "ann", "C": "carl"})
    cancelled: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)
    lose_replies: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Event = field(default_factory=asyncio.Event)

    def desk(self, principal: str) -> Desk:
        """The factory: a tool server for one principal."""
        return Desk(self, principal)

    def perform(self, principal: str, tool: str, args: dict[str, Any]) -> str:
        order = str(args.get("order"))
        self.asked.append((principal, tool, order))
        if self.owners.get(order) != principal:
            return REFUSED
        if tool == "status":
            return f"order {order} is on its way"
        if args.get("operation") not in self.keys or "operation" not in args:
            self.cancelled.append(order)
            self.keys.add(str(args.get("operation")))
        return f"order {order} is cancelled"


@dataclass
class Desk:
    shop: Shop
    principal: str
    _client_info: str = "shop"

    def has_tool(self, name: str) -> bool:
        return name == "orders"

    def get_tool_description(self, name: str, allowed_tools: list[str] | None = None) -> NamespaceDescription:
        keyed = KeyedTool("cancel_keyed", "Cancel an order under an operation key", SCHEMA)
        tools = [ToolDescription("status", "Where an order is", SCHEMA, True), ToolDescription("cancel", "", SCHEMA)]
        return NamespaceDescription("orders", "Orders", [*tools, keyed])  # type: ignore[list-item]

    @asynccontextmanager
    async def new_session(
        self, name: str, session_id: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[Desk]:
        yield self

    async def call_tool(self, name: str, args: dict[str, Any]) -> str:
        if name == "cleanup_session":
            return "ok"
        order = str(args.get("order"))
        if order in self.shop.slow:
            self.shop.arrived.set()
            await stubbornly(self.shop.answer)
        reply = self.shop.perform(self.principal, name.removesuffix("_keyed"), args)
        if self.shop.lose_replies:
            self.shop.lose_replies -= 1
            raise ToolServerGone("the shop's connection broke")
        return reply


@dataclass(frozen=True)
class KeyedTool:
    """A write that the shop recognises by its key."""

    name: str
    description: str
    parameters: dict[str, Any]
    read_only: bool = False
    operation_key: str = "operation"


async def stubbornly(event: asyncio.Event) -> None:
    """Wait to the end, whoever cancels."""
    while not event.is_set():
        try:
            await event.wait()
        except asyncio.CancelledError:
            continue


def status(order: str) -> dict[str, Any]:
    return {"name": "orders_status", "arguments": {"order": order}}


async def test_late_result_of_order_a_is_stale_and_reaches_neither_model_nor_user(make_loop: MakeLoop) -> None:
    shop = Shop(slow={"A"})
    rounds = [
        {"when": "order A", "calls": [status("A")]},
        {"when": "order B", "calls": [status("B")]},
        {"when": "order B", "text": "B is on its way."},
    ]
    driver, model = await make_loop(rounds, tools=shop.desk)
    run = await driver.start(LoopRequest("fake", "Where is order A?", tools=[ORDERS], principal="ann"))
    await shop.arrived.wait()
    assert run.switch("No: where is order B?")
    events = []
    async for event in run.events():
        events.append(event)
        if getattr(event, "delta", "").startswith("B is"):
            shop.answer.set()
    response = check_stream(events)
    result = await run.result()
    assert response is not None
    assert response.output_text == "B is on its way."
    assert "order A is" not in response.model_dump_json()
    assert "order A is" not in str(model.requests)
    assert [item.status for item in response.output if item.type == "mcp_call"] == ["incomplete", "completed"]
    by_order = {entry["arguments"]["order"]: entry for entry in result.trace.entries if entry["kind"] == "call"}
    assert by_order["A"]["terminal"] == "cancelled"
    assert by_order["B"]["terminal"] == "result"
    [refused] = [entry for entry in result.trace.entries if entry["kind"] == "refused_result"]
    assert (refused["verdict"], refused["output"], refused["generation"]) == ("stale", "order A is on its way", 1)
    assert [entry["generation"] for entry in result.trace.entries if entry["kind"] == "generation"] == [2]


async def test_late_answer_about_order_a_is_not_delivered(make_loop: MakeLoop) -> None:
    rounds = [
        {"when": "order A", "text": "A: it is lost.", "chunk": 3, "pause": "gate", "pause_at": 1},
        {"when": "order B", "text": "B is on its way."},
    ]
    driver, model = await make_loop(rounds)
    run = await driver.start(LoopRequest("fake", "Where is order A?"))
    events = []
    async for event in run.events():
        events.append(event)
        if getattr(event, "delta", "") == "A: ":
            assert run.switch("No: where is order B?")
            model.release("gate")
    response = check_stream(events)
    assert response is not None
    assert [(item.status, item.content[0].text) for item in response.output] == [
        ("incomplete", "A: "),
        ("completed", "B is on its way."),
    ]
    assert [message["content"] for message in model.requests[1]["messages"]] == [
        "Where is order A?",
        "No: where is order B?",
    ]


async def test_foreign_and_missing_orders_get_one_uniform_refusal_whoever_the_model_claims_to_ask_for(
    make_loop: MakeLoop,
) -> None:
    shop = Shop()
    claim = {"name": "orders_status", "arguments": {"order": "C", "principal": "carl", "user": "carl"}}
    driver, _ = await make_loop([{"calls": [claim, status("nonsense")]}, {"text": "sorry"}], tools=shop.desk)
    run = await driver.start(LoopRequest("fake", "I am Carl. Where is order C?", tools=[ORDERS], principal="ann"))
    result = await run.result()
    outputs = [item["output"] for item in result.transcript if item["type"] == "function_call_output"]
    assert outputs == [REFUSED, REFUSED]
    assert {principal for principal, _, _ in shop.asked} == {"ann"}
    assert {row["principal"] for row in result.trace.calls} == {"ann"}


async def test_a_write_whose_reply_was_lost_is_not_repeated(make_loop: MakeLoop) -> None:
    shop = Shop(lose_replies=1)
    cancel = {"name": "orders_cancel", "arguments": {"order": "A"}}
    driver, model = await make_loop([{"calls": [cancel]}, {"text": "I am not sure."}], tools=shop.desk)
    run = await driver.start(LoopRequest("fake", "Cancel order A", tools=[ORDERS], principal="ann"))
    result = await run.result()
    assert shop.cancelled == ["A"]
    assert "not known; it was not repeated" in model.requests[1]["messages"][-1]["content"]
    [row] = result.trace.calls
    assert (row["terminal"], len(row["attempts"])) == ("lost", 1)


async def test_a_read_whose_reply_was_lost_is_asked_again_within_its_bound(make_loop: MakeLoop) -> None:
    shop = Shop(lose_replies=5)
    driver, _ = await make_loop([{"calls": [status("A")]}, {"text": "no answer"}], tools=shop.desk)
    request = LoopRequest("fake", "?", tools=[ORDERS], principal="ann", limits=Limits(max_attempts=3))
    result = await (await driver.start(request)).result()
    assert len(shop.asked) == 3
    [row] = result.trace.calls
    assert [attempt["ended"] for attempt in row["attempts"]] == ["lost"] * 3
    assert row["terminal"] == "lost"


async def test_a_write_under_an_operation_key_is_asked_again_and_done_once(make_loop: MakeLoop) -> None:
    shop = Shop(lose_replies=1)
    arguments = {"order": "A", "operation": "op-7"}
    driver, _ = await make_loop(
        [{"calls": [{"name": "orders_cancel_keyed", "arguments": arguments}]}, {"text": "done"}], tools=shop.desk
    )
    result = await (await driver.start(LoopRequest("fake", "?", tools=[ORDERS], principal="ann"))).result()
    assert len(shop.asked) == 2
    assert shop.cancelled == ["A"]
    assert [row["terminal"] for row in result.trace.calls] == ["result"]


async def test_a_result_that_turns_out_conflicting_is_no_longer_used(make_loop: MakeLoop) -> None:
    shop = Shop()
    rounds = [{"calls": [status("A")]}, {"calls": [status("B")], "pause": "gate"}, {"text": "hm"}]
    driver, model = await make_loop(rounds, tools=shop.desk)
    run = await driver.start(LoopRequest("fake", "?", tools=[ORDERS], principal="ann"))
    await model.reached("gate")
    [row] = await driver.ledger.registry.calls(run.response_id)
    again = replace(row.arrivals[0].arrival, content=digest("something else"))
    assert await driver.ledger.deliver(again, 0.0) is Verdict.CONFLICT
    model.release("gate")
    result = await run.result()
    assert "order A" in str(model.requests[1]["messages"])
    assert "order A is" not in str(model.requests[2]["messages"])
    assert "neither is used" in str(model.requests[2]["messages"])
    assert [one["flagged"] for one in result.trace.calls] == [True, False]
