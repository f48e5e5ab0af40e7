"""What the conformance suite leaves in its output directory: one directory per scenario, with its checks."""

from __future__ import annotations

import json
import re
from pathlib import Path

# `server-SCENARIO-TIME`, the time as JavaScript's toISOString writes it with `-` for `:` and `.`. Scenarios have
# numbers and dates in their names too: only a whole time at the very end is the time.
_DIRECTORY = re.compile(r"server-(?P<scenario>.+)-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:-\d{1,9})?Z?")


def scenario(directory: str) -> str:
    """The scenario that a result directory is of. Raises ValueError for a name that is none of the suite's."""
    found = _DIRECTORY.fullmatch(directory)
    if found is None:
        raise ValueError(f"not a result directory of the conformance suite: {directory}")
    return found["scenario"]


def failures(output: Path) -> dict[str, list[str]]:
    """Per scenario what its failed checks say, of every run of it. Raises ValueError and OSError."""
    found: dict[str, list[str]] = {}
    for file in sorted(output.glob("*/checks.json")):
        said = found.setdefault(scenario(file.parent.name), [])
        said += [
            str(check.get("errorMessage")) for check in json.loads(file.read_text()) if check["status"] == "FAILURE"
        ]
    return found
