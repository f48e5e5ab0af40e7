"""The copy of the agent that is mounted: its bytecode is used unread by anybody, and is as small as it can be."""

from __future__ import annotations

import importlib.util
import marshal
import platform
import types
from collections.abc import Iterator
from pathlib import Path

import sandboxes.agent
from sandboxes.backends.agent_copy import make_agent

SOURCE = Path(sandboxes.agent.__path__[0])
HEADER_BYTES = 16
UNCHECKED_HASH = 0b01


def test_every_program_has_bytecode_that_needs_no_check_and_holds_no_text_for_people(tmp_path: Path) -> None:
    made = make_agent(tmp_path, SOURCE, "/inside", platform.python_version())
    programs = sorted(made.glob("*.py"))
    assert [path.name for path in programs] == sorted(path.name for path in SOURCE.glob("*.py"))
    for path in programs:
        bytecode = Path(importlib.util.cache_from_source(str(path))).read_bytes()
        assert bytecode[:4] == importlib.util.MAGIC_NUMBER
        assert int.from_bytes(bytecode[4:8], "little") == UNCHECKED_HASH
        code = marshal.loads(bytecode[HEADER_BYTES:])
        assert isinstance(code, types.CodeType)
        assert code.co_filename == f"/inside/{path.name}"
        assert "Above:" not in repr(code.co_consts)
        assert not any(name == "return" for inner in all_of(code) for name in strings(inner.co_consts))


def all_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from all_of(inner)


def strings(constants: tuple[object, ...]) -> Iterator[object]:
    """Those in tuples too, as annotations of functions are."""
    for constant in constants:
        yield from strings(constant) if isinstance(constant, tuple) else [constant]


def test_another_python_gets_no_bytecode(tmp_path: Path) -> None:
    made = make_agent(tmp_path, SOURCE, "/inside", "3.99.1")
    assert [*made.glob("*.py")] and not (made / "__pycache__").exists()
