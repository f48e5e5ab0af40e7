"""Directory trees that others change while a test looks at them: control groups, a running host's state."""

from __future__ import annotations

import os
from pathlib import Path


def find_named(root: Path, name: str) -> list[Path]:
    """Every file and directory of this name below `root`. A directory that goes meanwhile has nothing in it.

    `Path.glob("**/…")` raises FileNotFoundError for such a directory, up to Python 3.12.
    """
    return [Path(place) / name for place, directories, files in os.walk(root) if name in directories or name in files]
