"""The disk watch alone, with counts that take as long as the test says: how often it counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandboxes.agent import disk

LIMIT = 1 << 30


class HandLoop:
    """Timers go off, and descriptors are read, when the test says so."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []
        self.readers: dict[int, Callable[[int], None]] = {}

    def after(self, _seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        self.timers.append(call)
        return call

    def cancel(self, timer: Callable[[], None] | None) -> None:
        if timer in self.timers:
            self.timers.remove(timer)

    def watch(self, fd: int, _events: int, call: Callable[[int], None]) -> None:
        self.readers[fd] = call

    def forget(self, fd: int) -> None:
        del self.readers[fd]

    def pass_time(self) -> None:
        timers, self.timers = self.timers, []
        for timer in timers:
            timer()


class Bench:
    """A watch over a disk that has as much free as the test says, and its counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.free, self.now, self.counts = 1 << 20, 100.0, 0
        self.running = False
        self.over: list[tuple[int, int]] = []
        self._sinks: list[int] = []
        self.loop = HandLoop()
        found = SimpleNamespace(f_ffree=1 << 20, f_frsize=4096)
        monkeypatch.setattr(disk.os, "statvfs", lambda _path: SimpleNamespace(f_bfree=self.free, **vars(found)))
        monkeypatch.setattr(disk, "monotonic", lambda: self.now)
        children: Any = SimpleNamespace(expect=lambda *_: None, kill=lambda _pid: None)
        config: Any = SimpleNamespace(data=str(tmp_path), disk_bytes=LIMIT)
        loop: Any = self.loop
        spawner: Any = SimpleNamespace(worker=self._worker)
        self.watch = disk.DiskWatch(
            config, loop, spawner, children, lambda: self.running, lambda *found: self.over.append(found)
        )

    def _worker(self, _work: Callable[[], None], descriptors: list[int]) -> int:
        self.counts += 1
        self._sinks.append(os.dup(descriptors[1]))
        return 4000 + self.counts

    def begin(self) -> None:
        self.running = True
        self.watch.begin()

    def end(self) -> None:
        self.running = False
        self.watch.end()

    def counted(self, used: int) -> None:
        """The count that is under way comes to its end."""
        sink = self._sinks.pop()
        os.write(sink, b"%d 1" % used)
        os.close(sink)
        for call in list(self.loop.readers.values()):
            call(1)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    bench = Bench(monkeypatch, tmp_path)
    bench.begin()
    bench.end()
    bench.now += 1
    bench.loop.pass_time()
    bench.counted(4096)
    assert bench.counts == 1
    return bench


def test_short_executions_do_not_have_it_count_although_others_write_too(bench: Bench) -> None:
    for _ in range(20):
        bench.begin()
        bench.free -= 1
        bench.loop.pass_time()
        bench.end()
        bench.now += 0.2
    assert bench.counts == 1


def test_one_that_goes_on_is_counted_and_stopped(bench: Bench) -> None:
    bench.begin()
    bench.now += 0.6
    bench.free -= 1000
    bench.loop.pass_time()
    assert bench.counts == 2
    bench.counted(LIMIT + 1)
    assert bench.over == [(LIMIT + 1, 1)]


def test_executions_that_end_while_it_counts_are_no_reason_to_count_again(bench: Bench) -> None:
    bench.begin()
    bench.now += 0.6
    bench.free -= 1000
    bench.loop.pass_time()
    bench.end()
    bench.begin()
    bench.counted(8192)
    assert bench.counts == 2


def test_unless_what_was_written_since_may_have_filled_it(bench: Bench) -> None:
    bench.begin()
    bench.now += 0.6
    bench.free -= 1000
    bench.loop.pass_time()
    bench.free -= LIMIT // 4096
    bench.end()
    bench.begin()
    bench.counted(8192)
    assert bench.counts == 3
