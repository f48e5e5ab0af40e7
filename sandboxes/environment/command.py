"""Running a build's commands: output by lines to a progress report, a clear error at the end, no process left over.

Above: the other files of this package. Below: the standard library.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandboxes.errors import SandboxError

TAIL_LINES = 15  # how much of a failed command's output an error shows


class BuildFailed(SandboxError):
    """A build could not be finished. Nothing that existed before was changed. The message says what to do."""


class Step(enum.StrEnum):
    """What a build is doing, in the words that a person reads."""

    INSPECT = "looking at the interpreter"
    BASE = "getting the base image"
    DOWNLOAD = "downloading packages"
    INSTALL = "installing packages"
    COMPILE = "compiling bytecode"
    VERIFY = "importing every package"
    PUBLISH = "putting it in place"
    BUILD = "building the image"


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a build: the step, its number of how many (from 1), and its newest line of output, if any."""

    step: Step
    number: int
    total: int
    detail: str = ""


Report = Callable[[Progress], None]


class Steps:
    """Counts the steps of one build for its reports."""

    def __init__(self, report: Report, steps: Sequence[Step]) -> None:
        self._report = report
        self._steps = list(steps)
        self._current = self._steps[0]

    def begin(self, step: Step) -> None:
        self._current = step
        self.detail("")

    def detail(self, text: str) -> None:
        number = self._steps.index(self._current) + 1
        self._report(Progress(self._current, number, len(self._steps), text.strip()))


# Of the caller's environment these would send a build elsewhere; the rest (index, proxy, certificates) is meant for it.
_MISLEADING = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONDONTWRITEBYTECODE",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
    "PIP_REQUIREMENT",
    "__PYVENV_LAUNCHER__",
)


# Runs "$@" without input, and beside it what waits for the end of the caller: its end of the pipe closes then, however
# it died, and the whole group is ended.
_GUARD = """
exec 3<&0 </dev/null
(read -r _ <&3; kill -9 0) &
guard=$!
"$@" 3<&-
code=$?
kill -9 $guard
exit $code
"""


def run(argv: Sequence[str], *, on_line: Callable[[str], None], failure: str) -> str:
    """Runs a command without input and returns its output (stdout and stderr together, as text).

    Each line goes to `on_line` as it appears. Files that it makes are readable by everybody (umask 022): an
    unprivileged sandbox reads them. Whatever ends this function, or this process, the command and its children are gone
    afterwards.
    Raises BuildFailed, whose message is `failure`, the exit code and the last lines; when it cannot be started, too.
    """
    unset = [part for name in _MISLEADING for part in ("-u", name)]
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", "env", *unset, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            # Its own session: a Ctrl-C reaches this process alone, which then ends the whole group at once.
            start_new_session=True,
            umask=0o022,
        )
    except OSError as error:
        raise BuildFailed(f"{failure}: cannot start {argv[0]}: {error.strerror}") from error
    lines: list[str] = []
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.strip():
                tail.append(line.rstrip())
                on_line(line)
        code = process.wait()
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    if code != 0:
        shown = "\n".join(f"  {line}" for line in tail)
        raise BuildFailed(f"{failure} (exit code {code}). The last lines were:\n{shown}")
    return "".join(lines)
