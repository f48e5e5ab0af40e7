"""The copy of the agent that is mounted: its bytecode is used unread by anybody, and is as small as it can be."""

from __future__ import annotations

import importlib.util
import json
import marshal
import platform
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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


# As the launcher does, up to where a process would wait; then the modules that had to be looked for one by one.
LOAD = """
import json, sys
package = type(sys)("toolhost_agent")
package.__path__ = [sys.argv[1]]
sys.modules["toolhost_agent"] = package
from toolhost_agent import starting
starting._load("both")
from toolhost_agent import early
if sys.argv[2] == "interpreter":
    starting.interpreter()
    from toolhost_agent import lower
else:
    starting._load("agent")
    from toolhost_agent import supervisor
ours = {name: module for name, module in sys.modules.items() if name.startswith("toolhost_agent.")}
print(json.dumps({name.rpartition(".")[2]: module.__spec__ is not None for name, module in ours.items()}))
"""


def loaded(made: Path, kind: str) -> dict[str, bool]:
    """The modules of a process, and whether each was looked for."""
    command = [sys.executable, "-I", "-S", "-B", "-c", LOAD, str(made), kind]
    found: dict[str, bool] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def of_another_python(bundle: bytes) -> bytes:
    return b"\0\0\0\0" + bundle[len(importlib.util.MAGIC_NUMBER) :]


def cut_short(bundle: bytes) -> bytes:
    return bundle[: len(bundle) // 2]


@pytest.mark.parametrize("spoil", [of_another_python, cut_short, lambda bundle: b""], ids=["foreign", "cut", "empty"])
@pytest.mark.parametrize("kind", ["agent", "interpreter"])
def test_what_starts_together_is_in_bundles_which_are_whole_or_left_alone(
    tmp_path: Path, kind: str, spoil: Callable[[bytes], bytes]
) -> None:
    made = make_agent(tmp_path, SOURCE, str(tmp_path), platform.python_version())
    found = loaded(made, kind)
    assert [name for name, looked_for in found.items() if looked_for] == ["starting"]
    for path in made.glob("__pycache__/*.bundle"):
        path.write_bytes(spoil(path.read_bytes()))
    assert loaded(made, kind) == dict.fromkeys(found, True)
