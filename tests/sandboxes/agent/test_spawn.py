"""How the agent finds a program: as `os.execvpe` does, which it has not loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRY = """
import os, sys
from sandboxes.agent import spawn
def theirs(command, environment):
    os.execvpe(command[0], command, environment)
ours = spawn._execute
try:
    {which}({command!r}, {environment!r})
except (OSError, ValueError) as error:
    print(type(error).__name__, getattr(error, "errno", None))
"""


@pytest.mark.parametrize(
    "program", ["script", "./script", "absent", "closed", "later", "directory", "file/below", "", "/absent", "empty"]
)
@pytest.mark.parametrize("path", ["{0}/first:{0}/second", "{0}/file:{0}/second", "", ":{0}/second", None])
def test_a_program_is_found_or_refused_as_the_standard_library_does(
    tmp_path: Path, program: str, path: str | None
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second, first / "directory"):
        directory.mkdir()
    (tmp_path / "file").write_text("")
    (first / "empty").write_text("no program")
    for place, mode in (
        (second / "script", 0o755),
        (tmp_path / "script", 0o755),
        (first / "closed", 0o644),
        (first / "later", 0o644),
        (second / "later", 0o755),
        (first / "empty", 0o755),
    ):
        if place.name != "empty":
            place.write_text(f"#!/bin/sh\necho {place} $HOME\n")
        place.chmod(mode)
    environment = {"HOME": "here"} | ({} if path is None else {"PATH": path.format(tmp_path)})
    said = [
        subprocess.check_output(
            [sys.executable, "-c", TRY.format(which=which, command=[program], environment=environment)],
            text=True,
            cwd=tmp_path,
        )
        for which in ("ours", "theirs")
    ]
    assert said[0] == said[1] != ""
