"""What code does to its own session, on every backend: the session goes on, and what is told of it is true.

A test module has `class TestEndurance(EnduranceSuite)` and a fixture `host` that gives a `SuiteHost`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandboxes.manager import Attachment, SessionManager
from sandboxes.spec import Ending, Execution, Outcome, ShellCall, State
from sandboxes.testing.backend_suite import run
from sandboxes.testing.host import SuiteHost, attach, text_of

DIE = "import os\nos.kill(os.getpid(), 9)"

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
        "import shutil\nfor name in os.listdir():\n"
        "    shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)"
    ),
}


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
