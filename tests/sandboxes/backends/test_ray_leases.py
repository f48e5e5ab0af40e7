"""The bridge to Ray as a process that dies, hangs and says nonsense; a script plays Ray's half."""

# ruff: noqa: ASYNC110 - what these wait for tells nobody

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from sandboxes.backends import ray_leases
from sandboxes.backends.ray_leases import Lease, Leases
from sandboxes.backends.ray_names import LocalSettings, NodeSettings
from sandboxes.errors import EngineUnavailable, IsolationUnavailable, NoCapacity
from tests.sandboxes.backends.bubblewrap_host import environment

SOON_S = 30.0
# `behave(op, number)` answers; `number` counts the lives of the bridge in a file.
SCRIPT = """
import json, os, socket, sys, time
lives = {lives!r}
number = len(open(lives, "a+").read()) if not os.path.exists(lives) else os.path.getsize(lives)
open(lives, "a").write("x")
connection = socket.socket(fileno=int(sys.argv[1]))
{behave}
for line in connection.makefile("rb"):
    request = json.loads(line)
    answer = behave(request["op"], request["args"], number)
    if answer is not None:
        connection.sendall(json.dumps({{"id": request["id"], **answer}}).encode() + b"\\n")
"""
WELL = """
def behave(op, args, number):
    if op == "lease":
        return {"ok": {"lease": "aa", "node": "n1", "fresh": True}}
    if op == "find":
        return {"ok": None}
    return {"ok": {} if op == "start" else []}
"""

Make = Callable[[str], Awaitable[Leases]]


@pytest.fixture
async def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr(ray_leases, "BACKOFF_S", (0.05,))
    opened: list[Leases] = []

    async def make(behave: str) -> Leases:
        script = tmp_path / "bridge.py"
        script.write_text(SCRIPT.format(lives=str(tmp_path / "lives"), behave=behave))
        monkeypatch.setattr(ray_leases, "BRIDGE", (sys.executable, "-S", str(script)))
        leases = plain()
        opened.append(leases)
        await leases.open()
        return leases

    yield make
    for leases in opened:
        await leases.close()
    assert not [child.pid for child in psutil.Process().children() if is_bridge(child)]


def is_bridge(process: psutil.Process) -> bool:
    try:
        return any("bridge.py" in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def plain(**environment_: str) -> Leases:
    local = LocalSettings(environment=environment(), networks=frozenset({"net"}))
    settings = NodeSettings(owner_file="/owner", local=local)
    return Leases(address="auto", namespace="n", owner_id="o", settings=settings, environment=environment_)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.02)


async def test_answers_and_errors_come_to_who_asked(made: Make) -> None:
    leases = await made(
        WELL.replace(
            'if op == "lease":',
            'if op == "lease" and "full" in args["name"]:\n'
            '        return {"error": "NoCapacity", "message": "at capacity"}\n    if op == "lease":',
        )
    )
    assert await leases.lease("a") == Lease("aa", "n1", fresh=True)
    assert await leases.find("a") is None
    found = await asyncio.gather(leases.lease("full"), leases.nodes(), return_exceptions=True)
    assert isinstance(found[0], NoCapacity) and found[1] == []


async def test_a_bridge_that_dies_is_started_again_and_calls_meanwhile_fail_at_once(made: Make) -> None:
    leases = await made(
        WELL.replace('if op == "find":', 'if op == "find" and number == 0:\n        os._exit(7)\n    if op == "find":')
    )
    with pytest.raises(EngineUnavailable, match="lost"):
        await leases.find("a")
    await eventually(lambda: not leases.connected)
    with pytest.raises(EngineUnavailable):
        await leases.find("a")
    await eventually(lambda: leases.connected)
    assert await leases.find("a") is None


async def test_a_bridge_that_hangs_is_a_head_that_does_not_answer(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_leases, "CALL_S", 0.2)
    leases = await made(WELL.replace('return {"ok": None}', "return None"))
    with pytest.raises(EngineUnavailable, match="sessions that run go on"):
        await leases.find("a")
    assert await leases.nodes() == []  # others are answered


async def test_nonsense_from_the_bridge_ends_it_and_another_is_started(made: Make) -> None:
    behave = WELL.replace(
        'if op == "find":',
        'if op == "find" and number == 0:\n        connection.sendall(b"not JSON" + bytes([10]))\n    if op == "find":',
    )
    leases = await made(behave)
    with pytest.raises(EngineUnavailable):
        await leases.find("a")
    await eventually(lambda: leases.connected)
    assert await leases.find("a") is None


async def test_where_there_is_no_cluster_opening_says_so(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_leases, "START_S", 1.0)
    refused = '{"error": "EngineUnavailable", "message": "no connection to the Ray cluster x"}'
    with pytest.raises(EngineUnavailable, match="no connection to the Ray cluster"):
        await made(WELL.replace('return {"ok": {} if op == "start" else []}', f"return {refused}"))


REFUSED = '{"error": "NotAdmitted", "message": "the head refused the token"}'


async def test_a_cluster_that_refuses_this_host_is_not_asked_again(made: Make, tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="refused the token"):
        await made(WELL.replace('return {"ok": {} if op == "start" else []}', f"return {REFUSED}"))
    assert (tmp_path / "lives").read_text() == "x"


async def test_a_cluster_that_refuses_a_host_that_was_in_it_is_asked_again(made: Make) -> None:
    """Its token may be changed everywhere just now."""
    behave = WELL.replace(
        'if op == "find":', 'if op == "find" and number == 0:\n        os._exit(7)\n    if op == "find":'
    )
    refuses = f'if op == "start" and number in (1, 2):\n        return {REFUSED}\n    if op == "lease":'
    leases = await made(behave.replace('if op == "lease":', refuses))
    with pytest.raises(EngineUnavailable, match="lost"):
        await leases.find("a")
    await eventually(lambda: not leases.connected)
    await eventually(lambda: leases.connected)
    assert await leases.find("a") is None


async def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray')")
    leases = plain(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(IsolationUnavailable, match=r"pip install 'toolhost\[ray\]'"):
        await leases.open()
