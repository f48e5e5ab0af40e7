"""Ctrl-C of any command: understood while it loads, in order the first time, at once the second time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from toolhost import interrupts

ROOT = Path(__file__).parent.parent.parent
LOADING = "import time\nprint('loading', flush=True)\ntime.sleep(60)\n"
HANGS = """
import time
from toolhost import interrupts
interrupts.take()
{begin}
"""
SYNCHRONOUS = """
try:
    print('begun', flush=True)
    time.sleep(60)
finally:
    print('cleaning up', flush=True)
    time.sleep(60)
"""
ASYNCHRONOUS = """
import asyncio
async def work():
    try:
        print('begun', flush=True)
        await asyncio.sleep(60)
    finally:
        print('cleaning up', flush=True)
        time.sleep(60)
interrupts.run(work())
"""
ACTING = """
import signal
with interrupts.first(lambda: print('cleaning up', flush=True), signal.SIGTERM, left='left as it is'):
    print('begun', flush=True)
    time.sleep(60)
    time.sleep(60)
"""


@contextmanager
def running(*arguments: str, path: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    places = [str(one) for one in (path, ROOT) if one is not None]
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == f"{line}\n"


def until_ended(child: subprocess.Popen[str], number: signal.Signals) -> int:
    """Its exit code, with a signal now and then: one that comes too soon after the first counts as the same."""
    for _ in range(200):
        child.send_signal(number)
        try:
            return child.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("signals do not end it")


@pytest.mark.parametrize("command", ["serve", "run", "setup", "cluster", "gateway"])
def test_ctrl_c_while_the_command_line_itself_loads_is_said_in_a_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "typer.py").write_text(LOADING)
    with running("-m", "toolhost", command, path=tmp_path) as child:
        said(child, "loading")
        child.send_signal(signal.SIGINT)
        out, error = child.communicate(timeout=30)
    assert (child.returncode, out, error) == (130, "", "toolhost: interrupted\n")


@pytest.mark.parametrize(
    ("begin", "number"),
    [
        (SYNCHRONOUS, signal.SIGINT),
        (ASYNCHRONOUS, signal.SIGINT),
        (ACTING, signal.SIGINT),
        (ACTING, signal.SIGTERM),
    ],
    ids=["synchronous", "asynchronous", "acting", "acting on SIGTERM"],
)
def test_a_second_one_ends_what_hangs_in_its_clean_up(begin: str, number: signal.Signals) -> None:
    with running("-c", HANGS.format(begin=begin)) as child:
        said(child, "begun")
        child.send_signal(number)
        said(child, "cleaning up")
        assert until_ended(child, number) == 130
        assert child.stderr is not None
        assert child.stderr.read() == ("left as it is\n" if begin is ACTING else "toolhost: ended at once\n")


def test_two_at_once_are_one() -> None:
    code = HANGS.format(begin="try:\n    print('begun', flush=True)\n    time.sleep(60)\nfinally:\n    time.sleep(0.2)")
    with running("-c", code) as child:
        said(child, "begun")
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=30)
    assert error.endswith("KeyboardInterrupt\n")
    assert "ended at once" not in error


def test_where_ctrl_c_is_ignored_it_stays_so() -> None:
    async def work() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        return "done"

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.take()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert interrupts.run(work()) == "done"
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_was_handled_before_is_handled_again() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interrupts.first(lambda: None, signal.SIGTERM):
        assert isinstance(signal.getsignal(signal.SIGTERM), interrupts.Interrupts)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_what_is_run_cleans_up_in_its_own_loop_and_then_it_is_an_interrupt() -> None:
    cleaned = []

    async def work() -> None:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(work())
    assert cleaned == [True]


async def _cancelled() -> None:
    raise asyncio.CancelledError


def test_a_cancel_of_its_own_is_no_interrupt() -> None:
    with pytest.raises(asyncio.CancelledError):
        interrupts.run(_cancelled())
