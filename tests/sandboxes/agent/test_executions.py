"""Executions alone, with a clock and a performer that do as they are told: the order of two ends that meet."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sandboxes.agent.executions import Executions
from sandboxes.agent.run import Run


class HandLoop:
    """Timers go off when the test says so."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []

    def after(self, _seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        self.timers.append(call)
        return call

    def soon(self, call: Callable[[], None]) -> None: ...

    def cancel(self, timer: Callable[[], None] | None) -> None:
        if timer in self.timers:
            self.timers.remove(timer)


class Performer:
    """Its execution has ended when `over`, which it tells when it is asked to catch up."""

    def __init__(self) -> None:
        self.executions: Any = None
        self.run: Run | None = None
        self.over = False
        self.rungs_taken = 0

    def start(self, run: Run) -> None:
        self.run = run
        self.executions.began(run)

    def rungs(self, _run: Run) -> tuple[Callable[[], None], ...]:
        return (self._rung, self._rung, self._rung)

    def _rung(self) -> None:
        self.rungs_taken += 1

    def catch_up(self) -> None:
        if self.over and self.run is not None:
            self.run.ending = "ok"
            self.executions.ended(self.run)

    def pause(self, run: Run, paused: bool) -> None: ...


class Watcher:
    def begin(self) -> None: ...

    def scan(self, then: Callable[[list[dict[str, object]]], None]) -> None:
        then([])


class Waiter:
    connection: Any = None

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []

    def announce(self, frame: dict[str, Any]) -> None: ...

    def send_line(self, line: bytes) -> None:
        self.frames.append(json.loads(line))

    def send_output(self, text: str) -> None: ...


@pytest.mark.parametrize("over", [True, False], ids=["ended-untold", "still-runs"])
@pytest.mark.parametrize("how", ["deadline", "cancel", "limit"])
def test_an_end_that_was_not_told_yet_comes_before_whatever_would_stop_it(how: str, over: bool) -> None:
    loop, performer, waiter = HandLoop(), Performer(), Waiter()
    config = SimpleNamespace(grace_s=1.0)
    executions = Executions(config, loop, None, Watcher())  # type: ignore[arg-type]
    performer.executions = executions
    executions.performers["python"] = performer  # type: ignore[assignment]

    run = Run("a", "d", "python", {"code": "1"}, 1.0, 1000, 0.0)
    executions.submit(run, waiter)
    performer.over = over
    if how == "deadline":
        loop.timers[0]()
    elif how == "cancel":
        executions.cancel(run, "cancel")
    else:
        executions.stop_current("operator", "The disk is full.")
    assert performer.rungs_taken == (0 if over else 1)
    if over:
        assert waiter.frames[-1]["receipt"]["ending"] == "ok"
        assert waiter.frames[-1]["notes"] == []
    else:
        assert executions.current is run


def test_what_has_ended_and_is_acknowledged_is_gone_at_once() -> None:
    """Without a search for cycles, that is: memory which waits for one is cold when it is taken again."""
    loop, performer, waiter = HandLoop(), Performer(), Waiter()
    executions = Executions(SimpleNamespace(grace_s=1.0), loop, None, Watcher())  # type: ignore[arg-type]
    performer.executions = executions
    executions.performers["python"] = performer  # type: ignore[assignment]
    run = Run("a", "d", "python", {"code": "1"}, 1.0, 1000, 0.0)
    executions.submit(run, waiter)
    executions.wrote(b"said")
    performer.over = True
    performer.catch_up()
    executions.attempts.acknowledge("a")
    gone = weakref.ref(run)
    performer.run = None
    gc.disable()
    try:
        del run
        assert gone() is None
    finally:
        gc.enable()
