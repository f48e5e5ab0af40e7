"""The warm pool: ready before anybody asks, never beyond the room, never lost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandboxes.clock import SystemClock
from sandboxes.engine import Engine
from sandboxes.errors import EngineUnavailable
from sandboxes.owner import Owner
from sandboxes.pool import RETRY_S, Pool
from sandboxes.spec import SandboxSpec
from sandboxes.testing.clock import FakeClock
from sandboxes.testing.fake_backend import FakeBackend, FakeEngine
from sandboxes.testing.host import Recorder, until


class Place:
    """A pool, and the room that it has."""

    def __init__(self, clock: FakeClock | SystemClock, size: int = 2) -> None:
        self.room = 10
        self.engine = FakeEngine()
        self.recorder = Recorder()
        backend = FakeBackend(Owner("feedfacefeedface", b"k" * 32), self.engine)
        engine = Engine(backend, self.recorder, launch_s=5, destroy_s=5, engine_s=5)
        self.pool = Pool(engine, SandboxSpec(), size, room=lambda: self.room, clock=clock, observer=self.recorder)
        self.pool.start()


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place(SystemClock())
    yield made
    await made.pool.close()
    assert made.engine.sandboxes == {}


async def test_what_is_taken_is_filled_up_again(place: Place) -> None:
    await until(lambda: place.pool.ready == 2)
    taken = place.pool.take()
    assert taken is not None
    assert taken.connected
    await until(lambda: place.pool.ready == 2)
    assert taken.handle.sandbox_id not in place.pool.names
    await taken.destroy()


async def test_less_room_sends_ready_ones_away_and_more_brings_them_back(place: Place) -> None:
    await until(lambda: place.pool.ready == 2)
    place.room = 1
    place.pool.notice()
    await until(lambda: place.pool.count == 1)
    place.room = 0
    place.pool.notice()
    await until(lambda: place.pool.count == 0)
    assert place.pool.take() is None
    place.room = 5
    place.pool.notice()
    await until(lambda: place.pool.ready == 2)


async def test_giving_way_hands_over_what_stands_in_the_way(place: Place) -> None:
    await until(lambda: place.pool.ready == 2)
    assert await place.pool.give_way() is None
    place.room = 1
    handed = await place.pool.give_way()
    assert handed is not None
    assert place.pool.count <= 1
    await handed.destroy()


async def test_an_empty_pool_gives_way_at_once_however_many_wait(place: Place) -> None:
    await until(lambda: place.pool.ready == 2)
    place.room = -5
    place.pool.notice()
    await until(lambda: place.pool.count == 0)
    assert await place.pool.give_way() is None


async def test_giving_way_waits_for_what_is_just_being_launched(place: Place) -> None:
    await until(lambda: place.pool.ready == 2)
    place.engine.delays_s["launch"] = 0.1
    taken = [place.pool.take(), place.pool.take()]
    await until(lambda: place.pool.count == 1)
    place.room = 0
    handed = await place.pool.give_way()
    assert handed is not None
    assert place.pool.count == 0
    for sandbox in [*taken, handed]:
        assert sandbox is not None
        await sandbox.destroy()


async def test_a_pooled_sandbox_that_dies_is_replaced(place: Place) -> None:
    await until(lambda: place.pool.ready == 2)
    dead = next(iter(place.engine.sandboxes.values()))
    dead.agent.die()
    await until(lambda: dead.handle.sandbox_id not in place.engine.sandboxes and place.pool.ready == 2)


async def test_an_engine_that_fails_is_asked_again_later() -> None:
    clock = FakeClock()
    place = Place(clock, size=1)
    place.engine.fails["launch"] = EngineUnavailable("down")
    await until(lambda: clock.sleeping == 1)
    assert place.recorder.failures[0][0] == "pool"
    place.engine.fails.clear()
    await clock.advance(RETRY_S)
    await until(lambda: place.pool.ready == 1)
    await place.pool.close()
    assert place.engine.sandboxes == {}
