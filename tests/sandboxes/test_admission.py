"""Who gets a place, who waits, who is sent away."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.admission import Admission, Slot
from sandboxes.errors import NoCapacity
from sandboxes.testing.clock import FakeClock, settle


def make(
    total: int = 2, per_principal: int = 2, waiting: int = 4, queue_s: float = 30.0
) -> tuple[Admission, FakeClock]:
    clock = FakeClock()
    return Admission(total=total, per_principal=per_principal, max_waiting=waiting, queue_s=queue_s, clock=clock), clock


async def test_a_place_is_given_at_once_while_there_is_one_and_then_in_order() -> None:
    admission, _ = make()
    first, second = await admission.acquire("a"), await admission.acquire("b")
    positions: list[int] = []
    waiting = [asyncio.create_task(admission.acquire("c", positions.append)) for _ in range(2)]
    await settle()
    assert positions == [1, 2]
    admission.release(first)
    admission.release(first)
    await settle()
    assert [task.done() for task in waiting] == [True, False]
    admission.release(second)
    await asyncio.gather(*waiting)
    assert (admission.held, admission.waiting) == (2, 0)


async def test_ones_own_cap_delays_nobody_else() -> None:
    admission, _ = make(total=3, per_principal=1)
    await admission.acquire("a")
    waiting = asyncio.create_task(admission.acquire("a"))
    await settle()
    await admission.acquire("b")
    assert not waiting.done()
    assert admission.capped("a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert admission.waiting == 0


async def test_at_the_deadline_the_text_says_when_to_come_back() -> None:
    admission, clock = make(total=1, queue_s=30)
    await admission.acquire("a")
    waiting = asyncio.create_task(admission.acquire("b"))
    await settle()
    await clock.advance(29)
    assert not waiting.done()
    await clock.advance(2)
    with pytest.raises(NoCapacity, match=r"at capacity: all 1 sandboxes are in use$") as refused:
        await waiting
    assert refused.value.retry_after_s >= 1
    assert admission.waiting == 0


async def test_a_full_queue_refuses_at_once_but_the_longest_line_makes_way() -> None:
    admission, _ = make(total=1, waiting=4)
    await admission.acquire("a")
    flood = [asyncio.create_task(admission.acquire("flood")) for _ in range(4)]
    await settle()
    with pytest.raises(NoCapacity):
        await admission.acquire("flood")
    other = asyncio.create_task(admission.acquire("other"))
    await settle()
    assert not other.done()
    assert [task.done() for task in flood] == [False, False, False, True]
    for task in [*flood, other]:
        task.cancel()
    await asyncio.gather(*flood, other, return_exceptions=True)


async def test_a_place_granted_to_one_who_has_just_gone_is_not_lost() -> None:
    admission, _ = make(total=1)
    slot = await admission.acquire("a")
    waiting = asyncio.create_task(admission.acquire("b"))
    await settle()
    admission.release(slot)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert admission.held == 0


async def test_two_principals_share_by_turns_whoever_floods() -> None:
    admission, _ = make(total=20, per_principal=20, waiting=400)
    done: Counter[str] = Counter()
    order: list[str] = []

    async def client(principal: str) -> None:
        slot = await admission.acquire(principal)
        for _ in range(3):
            await asyncio.sleep(0)
        done[principal] += 1
        order.append(principal)
        admission.release(slot)

    clients = [asyncio.create_task(client("greedy")) for _ in range(180)]
    clients += [asyncio.create_task(client("modest")) for _ in range(20)]
    await asyncio.gather(*clients)
    last_modest = max(index for index, principal in enumerate(order) if principal == "modest")
    # the first 20 places were free for who came first; from then on neither waits for more than twice its share
    assert order[:last_modest].count("greedy") <= 20 + 2 * 20


ACTIONS = st.lists(st.tuples(st.sampled_from(["acquire", "release", "cancel", "wait"]), st.integers(0, 2)), max_size=60)


@settings(deadline=None)
@given(ACTIONS, st.integers(1, 4), st.integers(1, 3))
def test_caps_hold_and_no_place_is_lost_whatever_happens(actions: list[tuple[str, int]], total: int, each: int) -> None:
    async def play() -> None:
        admission, clock = make(total, each, waiting=5)
        tasks: list[asyncio.Task[Slot]] = []
        slots: list[Slot] = []
        for action, number in actions:
            if action == "acquire":
                tasks.append(asyncio.create_task(admission.acquire("abc"[number])))
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif action == "release" and slots:
                admission.release(slots.pop(number % len(slots)))
            elif action == "wait":
                await clock.advance(20)
            await settle(5)
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    slots.append(task.result())
            assert admission.held == len(slots) <= total
            assert all(admission.held_by(name) <= each for name in "abc")
            assert admission.waiting == len(tasks) <= 5
            idle = admission.held < total
            assert not idle or all(admission.capped(n) for n in "abc" if admission._waiting.get(n))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.waiting == 0

    asyncio.run(play())
