"""`%pip`: the environment's pip, installing into the session's own directory."""

from __future__ import annotations

import os
import sys

from . import pristine
from .pristine import BUILTINS

globals()["__builtins__"] = BUILTINS

_NO_NETWORK = (
    "This sandbox has no network access, so pip cannot download anything. "
    "Use the packages that are installed (%pip list), or install from a file under the working directory."
)
_NO_PIP = "This sandbox's environment has no pip, so nothing can be installed. Use the packages that are there."


def run(line: str) -> None:
    """Runs pip with the arguments in `line`, its output going where all output goes."""
    subprocess, shlex = pristine.load("subprocess"), pristine.load("shlex")
    arguments = shlex.split(line)
    if pristine.load("importlib.util").find_spec("pip") is None:
        print(_NO_PIP)
        return
    offline = not _has_route()
    options = []
    if arguments[:1] == ["install"]:
        # PIP_TARGET names the directory; pip wants --upgrade before it replaces anything there.
        options = ["--upgrade", "--root-user-action=ignore", *["--no-index"] * offline]
    command = [sys.executable, "-I", "-m", "pip", *arguments[:1], *options, *arguments[1:]]
    if subprocess.call(command, stdin=subprocess.DEVNULL):
        explain_failure(arguments[0] if arguments else "")
    pristine.load("importlib").invalidate_caches()


def explain_failure(command: str) -> None:
    """Says in plain words when it is for want of a network that pip's `command` failed."""
    if command in ("install", "download", "index") and not _has_route():
        print(_NO_NETWORK)


def _has_route() -> bool:
    """Whether the network namespace has a route beyond the loopback interface (Linux; else assumed)."""
    try:
        with open("/proc/net/route", encoding="ascii") as routes:  # noqa: PTH123
            if len(routes.readlines()) > 1:
                return True
        if not os.path.exists("/proc/net/ipv6_route"):  # noqa: PTH110
            return False
        with open("/proc/net/ipv6_route", encoding="ascii") as routes:  # noqa: PTH123
            return any(fields and fields[-1] != "lo" for fields in (line.split() for line in routes))
    except OSError:
        return True
