"""The acceptance table: every verdict once by name, then any interleaving against a model of the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from toolhost.loop.errors import LoopError
from toolhost.loop.ledger import Arrival, Attempt, CallRecord, Ledger, MemoryRegistry, Verdict, digest

T = TypeVar("T")


def now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits (the memory registry's do not: that is what makes them atomic)."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("the step was interrupted")


def call(**changes: Any) -> CallRecord:
    record = CallRecord(
        task="resp_1",
        generation=1,
        call_id="call_1",
        tool="orders.read",
        arguments=digest({"order": "A"}),
        executor="orders",
        principal="ann",
        attempts=(Attempt("att_1", 1, deadline=100.0),),
    )
    return replace(record, **changes)


def arrival(record: CallRecord, content: str = "shipped", **changes: Any) -> Arrival:
    came = Arrival(
        task=record.task,
        generation=record.generation,
        call_id=record.call_id,
        attempt=record.attempt.id,
        tool=record.tool,
        arguments=record.arguments,
        executor=record.executor,
        content=digest(content),
    )
    return replace(came, **changes)


async def registered(**changes: Any) -> tuple[Ledger, CallRecord]:
    ledger, record = Ledger(), call(**changes)
    await ledger.register(record)
    return ledger, record


async def row(ledger: Ledger) -> CallRecord:
    found = await ledger.registry.call("resp_1", "call_1")
    assert found is not None
    return found


async def test_first_result_of_a_live_attempt_is_accepted_and_usable() -> None:
    ledger, record = await registered()
    assert await ledger.deliver(arrival(record), 1.0) is Verdict.ACCEPTED
    assert await ledger.usable("resp_1", "call_1")


async def test_result_of_a_call_that_nobody_registered_is_unmatched_and_recorded() -> None:
    ledger = Ledger()
    assert await ledger.deliver(arrival(call()), 1.0) is Verdict.UNMATCHED
    assert [one.verdict for one in (await ledger.registry.task("resp_1")).strays] == [Verdict.UNMATCHED]


async def test_result_under_an_attempt_id_that_was_never_minted_is_unmatched() -> None:
    ledger, record = await registered()
    assert await ledger.deliver(arrival(record, attempt="att_9"), 1.0) is Verdict.UNMATCHED
    assert (await row(ledger)).terminal is None


async def test_same_content_again_is_a_duplicate_and_stays_usable() -> None:
    ledger, record = await registered()
    await ledger.deliver(arrival(record), 1.0)
    assert await ledger.deliver(arrival(record), 2.0) is Verdict.DUPLICATE
    assert await ledger.usable("resp_1", "call_1")


async def test_other_content_is_a_conflict_and_the_result_is_no_longer_used() -> None:
    ledger, record = await registered()
    await ledger.deliver(arrival(record), 1.0)
    assert await ledger.deliver(arrival(record, "lost"), 2.0) is Verdict.CONFLICT
    assert not await ledger.usable("resp_1", "call_1")
    assert (await row(ledger)).content == digest("shipped")


async def test_result_of_an_older_generation_is_stale() -> None:
    ledger, record = await registered()
    assert await ledger.switch("resp_1") == 2
    assert await ledger.deliver(arrival(record), 1.0) is Verdict.STALE
    assert not await ledger.current("resp_1", 1)
    assert await ledger.current("resp_1", 2)


async def test_result_after_the_timeout_is_late_and_never_replaces_it() -> None:
    ledger, record = await registered()
    assert await ledger.end("resp_1", "call_1", "att_1", "timeout")
    assert await ledger.deliver(arrival(record), 2.0) is Verdict.LATE
    assert (await row(ledger)).terminal == "timeout"


async def test_late_result_of_a_lost_attempt_closes_nothing_that_may_be_tried_again() -> None:
    ledger, record = await registered()
    assert await ledger.end("resp_1", "call_1", "att_1", "lost")
    assert await ledger.deliver(arrival(record), 2.0) is Verdict.LATE
    assert (await row(ledger)).terminal is None
    assert await ledger.retry("resp_1", "call_1", "att_2", 200.0)


async def test_result_past_the_deadline_is_late_even_if_nobody_had_looked_at_the_clock() -> None:
    ledger, record = await registered()
    assert await ledger.deliver(arrival(record), 100.0) is Verdict.LATE
    assert (await row(ledger)).terminal == "timeout"


@pytest.mark.parametrize(
    "change",
    [
        {"tool": "orders.cancel"},
        {"arguments": digest({"order": "B"})},
        {"executor": "elsewhere"},
        {"task": "resp_2"},
        {"call_id": "call_2"},
        {"generation": 2},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_result_that_claims_anything_else_is_a_mismatch(change: dict[str, Any]) -> None:
    ledger, record = await registered()
    assert await ledger.deliver(arrival(record, **change), 1.0) is Verdict.MISMATCH
    assert (await row(ledger)).terminal is None


async def test_retry_is_a_new_attempt_and_the_lost_one_comes_too_late() -> None:
    ledger, record = await registered()
    await ledger.end("resp_1", "call_1", "att_1", "lost")
    assert await ledger.retry("resp_1", "call_1", "att_2", 200.0)
    assert await ledger.deliver(arrival(record), 2.0) is Verdict.LATE
    assert await ledger.deliver(arrival(record, attempt="att_2"), 3.0) is Verdict.ACCEPTED


async def test_result_of_a_lost_attempt_after_its_retry_was_accepted_is_a_duplicate_or_a_conflict() -> None:
    for content, verdict in (("shipped", Verdict.DUPLICATE), ("on its way", Verdict.CONFLICT)):
        ledger, record = await registered()
        await ledger.end("resp_1", "call_1", "att_1", "lost")
        await ledger.retry("resp_1", "call_1", "att_2", 200.0)
        assert await ledger.deliver(arrival(record, attempt="att_2"), 3.0) is Verdict.ACCEPTED
        assert await ledger.deliver(arrival(record, content), 4.0) is verdict
        assert await ledger.usable("resp_1", "call_1") == (verdict is Verdict.DUPLICATE)


async def test_no_retry_while_an_attempt_lives_or_after_the_end_or_for_an_old_generation() -> None:
    ledger, _ = await registered()
    assert not await ledger.retry("resp_1", "call_1", "att_2", 200.0)
    await ledger.end("resp_1", "call_1", "att_1", "lost")
    await ledger.switch("resp_1")
    assert not await ledger.retry("resp_1", "call_1", "att_3", 200.0)
    await ledger.give_up("resp_1", "call_1")
    assert not await ledger.retry("resp_1", "call_1", "att_4", 200.0)
    assert (await row(ledger)).terminal == "lost"


async def test_a_call_id_is_registered_once() -> None:
    ledger, record = await registered()
    with pytest.raises(LoopError, match="already registered"):
        await ledger.register(record)


async def test_of_many_results_at_once_exactly_one_is_accepted() -> None:
    ledger, record = await registered()
    verdicts = await asyncio.gather(*(ledger.deliver(arrival(record, f"answer {n}"), 1.0) for n in range(20)))
    assert verdicts.count(Verdict.ACCEPTED) == 1
    assert verdicts.count(Verdict.CONFLICT) == 19


async def test_the_table_answers_what_became_of_every_call() -> None:
    ledger, record = await registered()
    await ledger.deliver(arrival(record), 1.0)
    await ledger.deliver(arrival(record), 2.0)
    [data] = await ledger.query("resp_1")
    assert data["terminal"] == "result"
    assert [one["verdict"] for one in data["arrivals"]] == ["accepted", "duplicate"]
    assert data["principal"] == "ann"


async def test_forgetting_a_task_drops_its_rows() -> None:
    registry = MemoryRegistry()
    ledger = Ledger(registry)
    await ledger.register(call())
    registry.forget("resp_1")
    assert await ledger.query("resp_1") == []
    assert await registry.call_of_attempt("att_1") is None


# Any interleaving


@dataclass
class Belief:
    """What the rules say of one call, written down independently of the ledger's code."""

    record: CallRecord
    live: str | None
    attempts: dict[str, float]
    accepted: str | None = None
    closed_by: str | None = None
    conflict: bool = False
    delivered: list[Verdict] = field(default_factory=list)


class AcceptanceTable(RuleBasedStateMachine):
    """Results, timeouts, losses, retries, cancels and generation switches in any order, on several calls."""

    calls: Bundle[str] = Bundle("calls")
    met: ClassVar[set[Verdict]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.clock = 0.0
        self.generation = 1
        self.closed = False
        self.minted = 0
        self.beliefs: dict[str, Belief] = {}
        self.strays: list[Verdict] = []

    def mint(self, prefix: str) -> str:
        self.minted += 1
        return f"{prefix}_{self.minted}"

    @rule(target=calls, tool=st.sampled_from(["read", "write"]), patience=st.integers(3, 12))
    def register(self, tool: str, patience: int) -> Any:
        if self.closed:
            return multiple()
        call_id, attempt = self.mint("call"), self.mint("att")
        attempts = (Attempt(attempt, 1, self.clock + patience),)
        record = call(call_id=call_id, tool=tool, generation=self.generation, attempts=attempts)
        now(self.ledger.register(record))
        self.beliefs[call_id] = Belief(record, attempt, {attempt: self.clock + patience})
        return call_id

    @rule(
        call_id=calls,
        content=st.sampled_from(["one", "two"]),
        which=st.integers(0, 3),
        lie=st.sampled_from(["", "", "", "tool", "arguments", "executor", "generation", "call_id"]),
    )
    def result_arrives(self, call_id: str, content: str, which: int, lie: str) -> None:
        belief = self.beliefs[call_id]
        attempts = [*belief.attempts, "att_never_minted"]
        attempt = attempts[min(which, len(attempts) - 1)]
        lies = {lie: 99 if lie == "generation" else "something else"} if lie else {}
        came = arrival(belief.record, content, attempt=attempt, **lies)
        verdict = now(self.ledger.deliver(came, self.clock))
        assert verdict is self.expected(belief, attempt, content, bool(lie))
        self.met.add(verdict)
        if lie == "call_id":
            self.strays.append(verdict)
        else:
            self.learn(belief, attempt, content, verdict)

    @rule(call_id=calls, content=st.sampled_from(["one", "two"]), newest=st.booleans())
    def honest_result_arrives(self, call_id: str, content: str, newest: bool) -> None:
        attempts = len(self.beliefs[call_id].attempts)
        self.result_arrives(call_id, content, attempts - 1 if newest else 0, "")

    @rule(call_id=calls, results=st.lists(st.tuples(st.sampled_from(["one", "two"]), st.booleans()), max_size=4))
    def several_results_arrive(self, call_id: str, results: list[tuple[str, bool]]) -> None:
        for content, newest in results:
            self.honest_result_arrives(call_id, content, newest)

    @rule(call_id=calls, other_task=st.booleans())
    def result_arrives_for_what_nobody_registered(self, call_id: str, other_task: bool) -> None:
        """Another task's name on a known attempt is a lie; a call and an attempt that are not known match nothing."""
        belief = self.beliefs[call_id]
        if other_task:
            came = arrival(belief.record, task="resp_2", attempt=next(iter(belief.attempts)))
            assert now(self.ledger.deliver(came, self.clock)) is Verdict.MISMATCH
            return
        came = arrival(belief.record, call_id=self.mint("call"), attempt="att_never_minted")
        self.strays.append(now(self.ledger.deliver(came, self.clock)))
        assert self.strays[-1] is Verdict.UNMATCHED

    def expected(self, belief: Belief, attempt: str, content: str, lied: bool) -> Verdict:
        if attempt not in belief.attempts:
            return Verdict.UNMATCHED
        if lied:
            return Verdict.MISMATCH
        if self.closed or belief.record.generation < self.generation:
            return Verdict.STALE
        if belief.accepted is not None:
            return Verdict.DUPLICATE if content == belief.accepted else Verdict.CONFLICT
        if belief.closed_by or attempt != belief.live:
            return Verdict.LATE
        return Verdict.LATE if self.clock >= belief.attempts[attempt] else Verdict.ACCEPTED

    def learn(self, belief: Belief, attempt: str, content: str, verdict: Verdict) -> None:
        belief.delivered.append(verdict)
        if verdict is Verdict.ACCEPTED:
            belief.accepted, belief.live = content, None
        if verdict is Verdict.CONFLICT:
            belief.conflict = True
        if verdict is Verdict.LATE and attempt == belief.live:
            belief.closed_by, belief.live = "timeout", None

    @rule(call_id=calls, how=st.sampled_from(["timeout", "cancelled", "lost"]))
    def attempt_ends(self, call_id: str, how: Any) -> None:
        belief = self.beliefs[call_id]
        attempt = list(belief.attempts)[-1]
        ended = now(self.ledger.end("resp_1", call_id, attempt, how))
        if belief.live == attempt and belief.closed_by is None:
            assert ended
            belief.live = None
            if how != "lost":
                belief.closed_by = how

    @rule(call_id=calls, patience=st.integers(3, 12))
    def retry(self, call_id: str, patience: int) -> None:
        belief = self.beliefs[call_id]
        attempt = self.mint("att")
        opened = now(self.ledger.retry("resp_1", call_id, attempt, self.clock + patience))
        may = not self.closed and belief.record.generation == self.generation and belief.live is None
        assert opened == (may and belief.accepted is None and belief.closed_by is None)
        if opened:
            belief.live = attempt
            belief.attempts[attempt] = self.clock + patience

    @rule(call_id=calls)
    def give_up(self, call_id: str) -> None:
        belief = self.beliefs[call_id]
        if belief.live is None:
            now(self.ledger.give_up("resp_1", call_id))
            if belief.accepted is None and belief.closed_by is None:
                belief.closed_by = "lost"

    @rule(by=st.integers(1, 2))
    def time_passes(self, by: int) -> None:
        self.clock += by

    # These two make everything before them stale, so they are not what a shrunk example is drawn to.

    @rule(really=st.booleans())
    def the_user_changes_their_mind(self, really: bool) -> None:
        if really:
            self.generation = now(self.ledger.switch("resp_1"))

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def the_task_is_cancelled(self, really: bool) -> None:
        if really:
            now(self.ledger.close("resp_1"))
            self.closed = True

    @invariant()
    def each_call_has_one_accepted_terminal_result_or_none(self) -> None:
        for call_id, belief in self.beliefs.items():
            found = now(self.ledger.registry.call("resp_1", call_id))
            assert found is not None
            verdicts = [one.verdict for one in found.arrivals]
            assert verdicts == belief.delivered
            assert verdicts.count(Verdict.ACCEPTED) == (1 if belief.accepted is not None else 0)
            assert (found.terminal == "result") == (belief.accepted is not None)
            assert found.content == (None if belief.accepted is None else digest(belief.accepted))
            assert found.usable == (belief.accepted is not None and not belief.conflict)
            assert belief.accepted is None or belief.closed_by is None

    @invariant()
    def what_belongs_to_no_call_is_recorded_with_the_task(self) -> None:
        assert [one.verdict for one in now(self.ledger.registry.task("resp_1")).strays] == self.strays

    @invariant()
    def only_the_newest_generation_delivers(self) -> None:
        for generation in range(1, self.generation + 1):
            may = generation == self.generation and not self.closed
            assert now(self.ledger.current("resp_1", generation)) == may


def test_any_interleaving_is_judged_by_the_table_and_meets_every_verdict() -> None:
    AcceptanceTable.met.clear()
    run_state_machine_as_test(
        AcceptanceTable, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
    )
    assert AcceptanceTable.met == set(Verdict)
