"""What is learned of an interpreter, and what a sandbox must be shown of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path, PurePosixPath

import pytest

from sandboxes.environment import interpreter as module
from sandboxes.environment.command import BuildFailed
from sandboxes.environment.interpreter import Interpreter, Target, inspect, is_system, parse_facts, preferred

TARGET = Target((3, 11), "x86_64", "glibc", (2, 36))

FACTS: dict[str, object] = {
    "implementation": "cpython",
    "version": [3, 11, 7],
    "machine": "x86_64",
    "libc": ["glibc", "2.36"],
    "prefix": "/opt/py",
    "executable": "/opt/py/bin/python3.11",
    "missing": [],
    "libraries": ["/usr/lib/libz.so.1"],
}


def interpreter(prefix: Path, *, binary: bytes = b"", libraries: tuple[Path, ...] = ()) -> Interpreter:
    executable = prefix / "bin" / "python3.11"
    executable.parent.mkdir(parents=True)
    executable.write_bytes(binary)
    return Interpreter(executable, prefix, "3.11.7", TARGET, libraries)


def test_this_interpreter_is_described_by_its_base_not_by_its_virtual_environment() -> None:
    found = inspect(Path(sys.executable), lambda line: None)
    assert found.target.version == sys.version_info[:2]
    assert found.prefix == Path(sys.base_prefix).resolve()
    assert found.executable.is_file()


def ignore(line: str) -> None:
    del line


def named(directory: Path, program: str, text: str) -> None:
    path = directory / program
    path.write_text(text)
    path.chmod(0o755)


def test_the_systems_python_is_preferred_where_it_is_of_this_version_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SYSTEM_PROGRAMS", tmp_path)
    monkeypatch.setattr(sys, "base_prefix", "/home/somebody/python")
    running = Path(sys.executable)
    program = f"python{sys.version_info.major}.{sys.version_info.minor}"
    named(tmp_path, "python3.0", f'#!/bin/sh\nexec {running} "$@"\n')
    assert preferred() == running  # none of this version
    named(tmp_path, program, "#!/bin/sh\necho no module named encodings >&2; exit 1\n")
    assert preferred() == running
    for parts, better in (
        (["venv/__init__.py"], running),
        (sorted(inspect(running, ignore).parts), tmp_path / program),
    ):
        named(tmp_path, program, f"#!/bin/sh\necho '{json.dumps(FACTS | {'parts': parts})}'\n")
        assert preferred() == better
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    assert preferred() == running  # it is the system's


def test_what_is_preferred_on_this_machine_can_be_built_on() -> None:
    found = inspect(preferred(), lambda line: None)
    assert found.target.version == sys.version_info[:2]
    assert is_system(found.prefix) or found.prefix == Path(sys.base_prefix).resolve()


def test_system_python_needs_no_mount() -> None:
    found = Interpreter(Path("/usr/bin/python3.11"), Path("/usr"), "3.11.2", TARGET, ())
    assert found.mounts() == []
    assert found.home_inside == PurePosixPath("/usr/bin")


def test_python_from_elsewhere_is_seen_at_a_neutral_path(tmp_path: Path) -> None:
    found = interpreter(tmp_path)
    assert found.mounts() == [(tmp_path, PurePosixPath("/opt/python"))]
    assert found.home_inside == PurePosixPath("/opt/python/bin")


def test_shared_libpython_that_is_sought_by_an_absolute_path_is_also_seen_there(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libpython3.11.so.1.0"
    found = interpreter(tmp_path, binary=f"\0{library.parent}\0".encode(), libraries=(library,))
    assert (library, PurePosixPath(library)) in found.mounts()


def test_shared_libpython_that_is_sought_relatively_is_not_mounted_twice(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libpython3.11.so.1.0"
    found = interpreter(tmp_path, binary=b"\0$ORIGIN/../lib\0", libraries=(library,))
    assert len(found.mounts()) == 1


def test_facts_become_a_target_whose_name_is_a_file_name() -> None:
    assert parse_facts(json.dumps(FACTS), "it").target.name == "cp311-glibc2.36-x86_64"


def test_platform_tags_fit_the_c_library_and_none_newer() -> None:
    tags = TARGET.platforms()
    assert "manylinux_2_36_x86_64" in tags
    assert "manylinux_2_28_x86_64" in tags
    assert "manylinux2014_x86_64" in tags
    assert "manylinux_2_37_x86_64" not in tags
    assert Target((3, 12), "aarch64", "musl", (1, 2)).platforms()[0] == "musllinux_1_2_aarch64"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"implementation": "pypy"}, "CPython >= 3.11"),
        ({"version": [3, 10, 13]}, "CPython >= 3.11"),
        ({"missing": ["ssl", "bz2"]}, "built without ssl, bz2"),
        ({"version": "three"}, "did not answer"),
        ({"libc": ["glibc", "x"]}, "did not answer"),
    ],
)
def test_unfit_interpreter_is_refused_with_the_reason(change: dict[str, object], says: str) -> None:
    with pytest.raises(BuildFailed, match=says):
        parse_facts(json.dumps(FACTS | change), "that Python")


@pytest.mark.parametrize("output", ["", "hello\n", "[]\n", "{}\n", "null\n"])
def test_program_that_is_no_python_is_refused(output: str) -> None:
    with pytest.raises(BuildFailed, match="did not answer as a Python does"):
        parse_facts(output, "/bin/ls")
