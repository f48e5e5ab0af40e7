"""Ending what belongs to an execution."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from sandboxes.agent.processes import Ender, Process, table


class Watched(Ender):
    """Ends nobody else's processes."""

    everything = False

    def end_all(self) -> None:
        self.everything = True


@pytest.fixture
def victims() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_what_was_killed_and_takes_its_time_to_go_is_not_taken_for_multiplying(
    victims: list[subprocess.Popen[bytes]],
) -> None:
    victims += [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    seen = {pid: process for pid, process in table().items() if pid in {victim.pid for victim in victims}}
    gone_at = time.monotonic() + 0.7
    ender = Watched()
    assert ender._end(lambda: seen if time.monotonic() < gone_at else {})
    assert not ender.everything
    assert all(victim.wait(5) == -9 for victim in victims)


def test_what_multiplies_faster_than_it_can_be_killed_takes_everything_with_it(
    victims: list[subprocess.Popen[bytes]],
) -> None:
    def look() -> dict[int, Process]:
        victims.append(subprocess.Popen(["sleep", "60"]))
        return {victims[-1].pid: table()[victims[-1].pid]}

    ender = Watched()
    assert not ender._end(look)
    assert ender.everything
