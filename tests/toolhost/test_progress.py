"""Partial output for clients that ask: what reaches them, and what it costs a call whose client does not read."""

from __future__ import annotations

import asyncio

import pytest

from sandboxes.events import Printed, Started
from toolhost.progress import WAITING_CHARACTERS, Progress


class Client:
    """Takes notifications, when it is let."""

    def __init__(self) -> None:
        self.got: list[tuple[float, float | None, str | None]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.came = asyncio.Event()
        self.stalled = asyncio.Event()  # one is on its way and not let

    async def send(self, progress: float, total: float | None, message: str | None) -> None:
        if not self.reads.is_set():
            self.stalled.set()
        await self.reads.wait()
        self.got.append((progress, total, message))
        self.came.set()


async def test_text_is_sent_while_the_call_runs_and_all_of_it_before_its_result() -> None:
    client = Client()
    async with Progress(client.send) as progress:
        progress(Started("a", 1, 1))
        progress(Printed("a", "first\n"))
        await asyncio.wait_for(client.came.wait(), 5)
        progress(Printed("a", "sec"))
        progress(Printed("a", "ond\n"))
    assert "".join(message or "" for _, _, message in client.got) == "first\nsecond\n"
    assert [done for done, _, _ in client.got] == sorted({done for done, _, _ in client.got})
    assert client.got[-1][0] == len("first\nsecond\n")


async def test_what_is_being_sent_when_the_call_ends_is_sent_before_its_result() -> None:
    """A transport takes its time for a notification: the call may end within it."""
    client = Client()
    async with Progress(client.send) as progress:
        progress(Printed("a", "first\n"))
        await asyncio.wait_for(client.came.wait(), 5)
        client.reads.clear()
        progress(Printed("a", "last\n"))
        await asyncio.wait_for(client.stalled.wait(), 30)
        asyncio.get_running_loop().call_soon(client.reads.set)
    assert [message for _, _, message in client.got] == ["first\n", "last\n"]


async def test_a_call_that_prints_nothing_sends_nothing() -> None:
    client = Client()
    async with Progress(client.send):
        pass
    assert client.got == []


async def test_a_client_that_does_not_read_costs_bounded_memory_and_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolhost.progress.LAST_S", 0.05)
    client = Client()
    client.reads.clear()
    async with asyncio.timeout(5):
        async with Progress(client.send) as progress:
            for _ in range(1000):
                progress(Printed("a", "x" * 1000))
            assert len(progress._waiting) <= WAITING_CHARACTERS + 1000
    assert client.got == []


async def test_a_call_that_fails_or_is_cancelled_sends_no_more() -> None:
    client = Client()
    client.reads.clear()
    with pytest.raises(RuntimeError, match="the call"):
        async with Progress(client.send) as progress:
            progress(Printed("a", "x"))
            raise RuntimeError("the call")
    assert client.got == []


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("closed")])
async def test_a_client_that_is_gone_harms_nothing(error: Exception) -> None:
    async def send(progress: float, total: float | None, message: str | None) -> None:
        raise error

    async with Progress(send) as progress:
        progress(Printed("a", "x\ud800"))
