"""What code does to its own session, on every backend: the session goes on, and what is told of it is true.

A test module has `class TestEndurance(EnduranceSuite)` and a fixture `host` that gives a `SuiteHost`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandboxes.manager import Attachment, SessionManager
from sandboxes.spec import Cause, CauseKind, Ending, Execution, Outcome, Retention, ShellCall, State
from sandboxes.testing.backend_suite import run, started
from sandboxes.testing.host import SuiteHost, attach, text_of, until

DIE = "import os\nos.kill(os.getpid(), 9)"

DIES_LATER = "threading.Timer(0.3, os._exit, [3]).start()"

# Done to the session's directory, then the interpreter dies.
RUINS = {
    "no mode": "os.chmod('/mnt/data', 0)",
    "a mode without writing": "os.chmod('/mnt/data', 0o500)",
    "everything unwritable": (
        "for name in ('.outputs', '.site', '.config', '.uploads'):\n"
        "    os.makedirs(name, exist_ok=True)\n    os.chmod(name, 0)\nos.chmod('/mnt/data', 0)"
    ),
    "files where directories belong": (
        "import shutil\nfor name in ('.outputs', '.site', '.config', '.uploads', '.ipython'):\n"
        "    shutil.rmtree(name, ignore_errors=True)\n    open(name, 'w').close()"
    ),
    "links to nowhere and to itself": (
        "import shutil\nfor name in ('.outputs', '.site', '.config', '.uploads', '.ipython'):\n"
        "    shutil.rmtree(name, ignore_errors=True)\n    os.symlink(name, name)"
    ),
    "pipes where files belong": (
        "for name in ('matplotlibrc', 'sitecustomize.py', 'usercustomize.py', '.bashrc', '.profile', 'pyvenv.cfg'):\n"
        "    os.mkfifo(name)"
    ),
    "modules that end whoever imports them": (
        "for name in ('json', 'socket', 'traceback', 'ast', 'sitecustomize', 'encodings', 'toolhost_agent'):\n"
        "    open(name + '.py', 'w').write('import os\\nos._exit(3)')"
    ),
    "emptied": (
        "import shutil\nfor name in os.listdir():\n    shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)"
    ),
}

# Writes the answer of cell NUMBER on whichever descriptor takes it to the agent.
ANSWER = """
import json, os
answer = {'t': 'done', 'n': NUMBER, 'outcome': 'ok', 'value': "'forged'", 'error': None, 'images': [], 'note': None}
for fd in range(3, 2048):
    try:
        if os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'):
            os.write(fd, json.dumps(answer).encode() + b'\\n')
    except OSError:
        pass
"""
# Directories without a mode: whoever removes them needs to open them first.
TREES = {
    "deep": (
        "for _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n"
        "for _ in range(3000):\n    os.chdir('..')\n    os.chmod('d', 0)"
    ),
    "wide": (
        "for n in range(500):\n    os.makedirs(f'd{n}/e')\n    open(f'd{n}/e/f', 'w').close()\n"
        "    os.symlink('/etc', f'd{n}/e/link')\n    os.mkfifo(f'd{n}/e/pipe')\n"
        "    os.chmod(f'd{n}/e', 0o1000)\n    os.chmod(f'd{n}', 0o1000)"
    ),
}
STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: "


async def shell(at: Attachment, cmd: str, name: str | None = None) -> Outcome:
    return await at.run(Execution(ShellCall(cmd, shell=name), timeout_s=20.0))


class EnduranceSuite:
    """Each test has a session of its own on the module's `host`."""

    @pytest.fixture
    async def manager(self, host: SuiteHost) -> AsyncIterator[SessionManager]:
        async with host.manager() as manager:
            yield manager

    @pytest.fixture
    async def at(self, manager: SessionManager) -> Attachment:
        return attach(manager, "a")

    # --- its directory

    @pytest.mark.parametrize("ruin", RUINS)
    async def test_a_session_whose_code_ruined_its_directory_goes_on(self, at: Attachment, ruin: str) -> None:
        killed = await run(at, f"import os\n{RUINS[ruin]}\n{DIE}")
        assert (killed.receipt.ending, killed.receipt.state) == (Ending.KILLED, State.LOST)
        after = await run(at, "import os\nos.getcwd()")
        assert (after.receipt.ending, after.receipt.state, after.value) == (Ending.OK, State.KEPT, "'/mnt/data'")
        assert text_of(await run(at, "open('/mnt/data/new', 'w').write('x')")) == "1"
        said = await shell(at, "cat new")
        assert (said.exit_code, text_of(said)) == (0, "x")
        named = await shell(at, "cat new", "s")
        assert (named.exit_code, text_of(named)) == (0, "x"), named

    async def test_a_directory_without_a_mode_is_no_hindrance_to_shells_and_files(
        self, manager: SessionManager, at: Attachment
    ) -> None:
        await run(at, "open('kept', 'w').write('k')")
        await run(at, "import os\nos.chmod('/mnt/data', 0)")
        assert text_of(await shell(at, "cat kept")) == "k"
        await run(at, "os.chmod('/mnt/data', 0)")
        assert b"".join([piece async for piece in manager.files(at.key).get("kept", 10)]) == b"k"

    # --- its processes

    async def test_a_process_left_behind_is_not_taken_for_a_fork_bomb_and_shells_live_on(self, at: Attachment) -> None:
        await shell(at, "sleep 300 & x=1", "s")
        daemon = (
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(300)\n"
            "    os._exit(0)\n"
        )
        hungry = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'x = bytes(64 << 20); input()'])\n"
        for left in (daemon, hungry):
            outcome = await run(at, f"{left}{DIE}")
            assert outcome.receipt.ending is Ending.KILLED, outcome
            assert "multiplied" not in " ".join(outcome.notes), outcome
            said = await shell(at, "echo $x; jobs -r | wc -l", "s")
            assert text_of(said).split() == ["1", "1"], said

    # --- its interpreter's channel

    async def test_code_that_answers_for_itself_and_runs_on_is_interrupted_when_the_next_call_comes(
        self, at: Attachment
    ) -> None:
        await run(at, "kept = 1")
        forged = await run(at, f"{ANSWER.replace('NUMBER', '2')}\nwhile True: pass")
        assert (forged.receipt.sequence, forged.value) == (2, "'forged'")
        after = await run(at, "kept")
        assert (after.receipt.ending, after.value) == (Ending.OK, "1"), after
        assert "answered in its own place" in " ".join(after.notes)

    async def test_code_that_answers_for_itself_and_cannot_be_interrupted_is_not_blamed_on_the_next_call(
        self, at: Attachment
    ) -> None:
        await run(at, f"{ANSWER.replace('NUMBER', '1')}\n{STUBBORN}pass")
        after = await run(at, "open('ran', 'w')")
        assert (after.receipt.ending, after.receipt.state) == (Ending.NEVER_STARTED, State.LOST), after
        assert "code of an earlier call had answered in its own place" in " ".join(after.notes)
        assert text_of(await run(at, "import os\nos.path.exists('ran')")) == "False"

    async def test_code_that_answers_for_itself_does_not_outlive_its_deadline(self, at: Attachment) -> None:
        on_and_on = f"print(os.getpid(), file=open('pid', 'w'), flush=True)\n{STUBBORN}pass"
        await run(at, f"{ANSWER.replace('NUMBER', '1')}\n{on_and_on}", timeout_s=3.0)
        gone = "until [ -s pid ]; do sleep 0.1; done; while [ -e /proc/$(cat pid) ]; do sleep 0.1; done"
        ended = await shell(at, gone)
        assert ended.receipt.ending is Ending.OK, ended
        after = await run(at, "'next'")
        assert (after.receipt.ending, after.value, after.receipt.epoch) == (Ending.OK, "'next'", 2), after

    async def test_an_interpreter_whose_channel_was_closed_says_so_in_words(self, at: Attachment) -> None:
        outcome = await run(at, "import os\nos.closerange(3, 4096)")
        assert outcome.receipt.ending is Ending.KILLED
        assert "closes its control channel" in " ".join(outcome.notes)
        assert text_of(await run(at, "'next'")) == "'next'"

    async def test_senseless_words_on_the_channel_are_named_as_why_the_interpreter_was_ended(
        self, at: Attachment
    ) -> None:
        outcome = await run(at, ANSWER.replace("NUMBER", "77") + "\nwhile True: pass")
        assert outcome.receipt.ending is Ending.KILLED
        assert "something wrote to its control channel" in " ".join(outcome.notes)

    async def test_a_death_between_two_calls_is_told_by_the_next_one_once(self, at: Attachment) -> None:
        await run(at, "x = 41\nopen('kept', 'w').close()")
        await run(at, "import os, threading\nopen('pid', 'w').write(f'{os.getpid()}\\n')\n" + DIES_LATER)
        gone = await shell(at, "while [ -e /proc/$(cat pid) ]; do sleep 0.1; done; ls kept")
        assert gone.state_lost_before is None  # it is variables that are lost, and a command has none
        after = await run(at, "import os\n('x' in globals(), os.path.exists('kept'))")
        assert (after.receipt.ending, after.value) == (Ending.OK, "(False, True)")
        assert "died after the previous call (exit code 3); files are kept" in (after.state_lost_before or "")
        assert (await run(at, "1")).state_lost_before is None

    # --- its end

    async def test_a_call_that_a_clean_up_ended_says_so_and_that_nothing_is_left(
        self, host: SuiteHost, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a", Retention.REQUEST)
            call = await started(at, "import time\nwhile True: time.sleep(0.1)")
            await at.cleanup()
            outcome = await call
        assert (outcome.receipt.ending, outcome.receipt.state) == (Ending.KILLED, State.LOST)
        assert outcome.receipt.cause == Cause(CauseKind.SESSION_CLOSED)
        assert "its client cleaned it up; the code was ended, and its variables and files are gone" in outcome.notes[0]
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []

    @pytest.mark.parametrize("shape", TREES)
    async def test_what_is_hard_to_remove_is_removed_with_its_session(self, host: SuiteHost, shape: str) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a", Retention.REQUEST)
            made = await run(at, f"import os\n{TREES[shape]}\nos.chmod('/mnt/data', 0)\n'made'")
            assert made.value == "'made'", made
            await at.cleanup()
            await until(lambda: host.leftovers() == [], 30.0)
