"""How the interpreter process is started: its command line, in one place."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_BOOT = """import sys
sys.path.insert(0, sys.argv[1])
from {0}.interpreter import main
sys.path.pop(0)
main(int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
"""


def command(python: str, channel: int, home: str, site: str, modules: Sequence[str] = ()) -> list[str]:
    """The argument vector of an interpreter process.

    `python` is the executable; `channel` the number of the inherited socket descriptor; `home` the working directory;
    `site` the directory that `%pip` installs into; `modules` are imported before the process is ready. The caller gives
    it a session of its own, /dev/null as stdin and one pipe as stdout and stderr.
    """
    package = (__package__ or "").split(".")
    root = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib doubles the start time
    for _ in package:
        root = os.path.dirname(root)  # noqa: PTH120
    boot = _BOOT.format(".".join(package))
    # -I: no PYTHON* variables, no user site, no working directory on the path. -B: the agent's directory is read-only.
    return [python, "-I", "-B", "-c", boot, root, str(channel), home, site, *modules]
