"""Uids: no two living sandboxes share one, whichever host started them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.backends.pidfd import Process
from sandboxes.backends.uids import UidRange, Uids
from sandboxes.errors import NoCapacity


@pytest.fixture
def uids(tmp_path: Path) -> Uids:
    made = Uids(tmp_path / "uids", UidRange(300_000, 3))
    made.make()
    return made


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_living_claims_get_different_uids_until_there_are_no_more(uids: Uids, tmp_path: Path) -> None:
    me = Process.of(os.getpid())
    other_host = Uids(tmp_path / "uids", UidRange(300_000, 3))
    claimed = {uids.claim("a", me, None), other_host.claim("b", me, None), uids.claim("c", me, None)}
    assert claimed == {300_000, 300_001, 300_002}
    with pytest.raises(NoCapacity, match="range"):
        other_host.claim("d", me, None)
    uids.release(300_001, "a")
    uids.release(300_001, "b")
    uids.release(300_001, "c")
    uids.release(300_001, "c")
    assert other_host.claim("d", me, None) == 300_001


def test_a_claim_ends_with_the_process_that_holds_it(uids: Uids, sleeper: subprocess.Popen[bytes]) -> None:
    me = Process.of(os.getpid())
    for name in "abc":
        uids.hold(uids.claim(name, me, None), name, Process.of(sleeper.pid))
    with pytest.raises(NoCapacity):
        uids.claim("d", me, None)
    sleeper.kill()
    sleeper.wait()
    assert uids.claim("d", me, None) in range(300_000, 300_003)


def test_a_workspaces_uid_is_used_again_even_while_another_has_it(uids: Uids) -> None:
    me = Process.of(os.getpid())
    taken = uids.claim("a", me, None)
    assert uids.claim("b", me, taken) == taken
    uids.release(taken, "b")
    assert {uids.claim("c", me, None), uids.claim("d", me, None)} == {300_000, 300_001, 300_002} - {taken}


def test_a_damaged_claim_is_no_claim(uids: Uids, tmp_path: Path) -> None:
    for uid in range(300_000, 300_003):
        (tmp_path / "uids" / f"{uid}.x").write_text("{")
    assert uids.claim("a", Process.of(os.getpid()), None) in range(300_000, 300_003)
