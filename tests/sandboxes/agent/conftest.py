from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .interpreter_process import InterpreterProcess


@pytest.fixture
def python(tmp_path: Path) -> Iterator[InterpreterProcess]:
    """An interpreter process in which `x` is 41, cell 1 having set it."""
    with InterpreterProcess(tmp_path) as process:
        process.run("x = 41")
        yield process
