"""Facts about a Python that sandboxes are to run: its version, its libraries, and what of the host it needs to see.

Above: embedded (the host's interpreter), image (the base image's), wheelhouse (which wheels fit). Below: nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sandboxes.environment.command import BuildFailed, run

OLDEST = (3, 11)  # as the agent needs

# What a sandbox sees of the host anyway, read-only.
SYSTEM_DIRECTORIES = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
# Where an interpreter from elsewhere (pyenv, uv, conda, a home directory) is mounted inside.
PYTHON_INSIDE = PurePosixPath("/opt/python")

# Where the system's own is, by its version ("python3.11").
SYSTEM_PROGRAMS = Path("/usr/bin")

# Run by the interpreter in question.
FACTS = Path(__file__).with_name("facts.py")


@dataclass(frozen=True, slots=True)
class Target:
    """Which wheels fit: CPython's version, the machine, and the C library ("glibc" or "musl") with its version."""

    version: tuple[int, int]
    machine: str
    libc: str
    libc_version: tuple[int, int]

    @property
    def name(self) -> str:
        """A file name for it: "cp311-glibc2.36-x86_64"."""
        major, minor = self.version
        return f"cp{major}{minor}-{self.libc}{self.libc_version[0]}.{self.libc_version[1]}-{self.machine}"

    def platforms(self) -> list[str]:
        """The platform tags that fit, newest first (PEP 600, PEP 656)."""
        major, newest = self.libc_version
        if self.libc == "musl":
            return [f"musllinux_{major}_{minor}_{self.machine}" for minor in range(newest, -1, -1)]
        tags = [f"manylinux_{major}_{minor}_{self.machine}" for minor in range(newest, 4, -1)]
        return [*tags, *(f"{old}_{self.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1"))]


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A base interpreter (never a virtual environment's own)."""

    executable: Path
    prefix: Path
    full_version: str
    target: Target
    libraries: tuple[Path, ...]
    parts: frozenset[str] = frozenset()  # see `facts.parts`

    @property
    def home_inside(self) -> PurePosixPath:
        """The directory of its executable as a sandbox sees it."""
        if is_system(self.prefix):
            return PurePosixPath(self.executable.parent)
        return PYTHON_INSIDE / self.executable.parent.relative_to(self.prefix)

    def mounts(self) -> list[tuple[Path, PurePosixPath]]:
        """What a sandbox must be given beside the system's directories, as (host path, path inside), read-only."""
        if is_system(self.prefix):
            return []
        return [(self.prefix, PYTHON_INSIDE), *((library, PurePosixPath(library)) for library in self._by_old_path())]

    def _by_old_path(self) -> list[Path]:
        # A Python built with --enable-shared looks for its libpython by an absolute path: that one file is shown there.
        binary = self.executable.read_bytes()
        return [
            library
            for library in self.libraries
            if library.name.startswith("libpython")
            and library.is_relative_to(self.prefix)
            and str(library.parent).encode() in binary
        ]


def is_system(path: Path) -> bool:
    """Whether a sandbox sees this path of the host anyway."""
    return any(path.is_relative_to(directory) for directory in SYSTEM_DIRECTORIES)


def preferred() -> Path:
    """The Python to build on where none is named: the one that runs this, or the system's, where that is of the same
    version and lacks nothing that the other has.

    A sandbox sees the system's anyway, and needs no mounts for it; it stays where a version manager or a deleted
    virtual environment takes the other away; and systems build it for speed, which version managers by default do not.
    Raises BuildFailed when the one that runs this cannot be used.
    """
    running = Path(sys.executable)
    if is_system(Path(sys.base_prefix)):
        return running
    system = SYSTEM_PROGRAMS / f"python{sys.version_info.major}.{sys.version_info.minor}"
    try:
        found = inspect(system, lambda line: None)
    except BuildFailed:
        return running
    return system if found.parts >= inspect(running, lambda line: None).parts else running


def inspect(python: Path, on_line: Callable[[str], None]) -> Interpreter:
    """The base interpreter behind `python` (which may belong to a virtual environment). Raises BuildFailed."""
    output = run([str(python), "-I", str(FACTS)], on_line=on_line, failure=f"{python} cannot be used as a Python")
    interpreter = parse_facts(output, str(python))
    prefix = interpreter.prefix
    if not interpreter.executable.is_relative_to(prefix):
        raise BuildFailed(
            f"{python} is at {interpreter.executable}, outside of its own prefix {prefix}: "
            "name a Python of the usual layout with --python, for example /usr/bin/python3"
        )
    strangers = [path for path in interpreter.libraries if not is_system(path) and not path.is_relative_to(prefix)]
    if strangers:
        raise BuildFailed(
            f"{python} loads {strangers[0]}, which a sandbox does not see: "
            "name another Python with --python, for example /usr/bin/python3"
        )
    return interpreter


def parse_facts(output: str, whose: str) -> Interpreter:
    """What facts.py printed, checked. `whose` names the interpreter in errors. Raises BuildFailed."""
    try:
        facts = json.loads(output.strip().splitlines()[-1])
        version = tuple(int(part) for part in facts["version"])
        libc = "glibc" if facts["libc"][0] == "glibc" else "musl"
        major, minor = (int(part) for part in facts["libc"][1].split(".")[:2])
        target = Target((version[0], version[1]), str(facts["machine"]), libc, (major, minor))
        missing = [str(name) for name in facts["missing"]]
        interpreter = Interpreter(
            executable=Path(facts["executable"]),
            prefix=Path(facts["prefix"]),
            full_version=".".join(map(str, version)),
            target=target,
            libraries=tuple(Path(path) for path in facts["libraries"]),
            parts=frozenset(map(str, facts.get("parts", []))),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BuildFailed(f"{whose} did not answer as a Python does ({type(error).__name__})") from error
    if facts["implementation"] != "cpython" or version < OLDEST:
        raise BuildFailed(f"{whose} is {facts['implementation']} {interpreter.full_version}: CPython >= 3.11 is needed")
    if missing:
        raise BuildFailed(
            f"{whose} was built without {', '.join(missing)}, which the packages need: use another Python, "
            "or build it again with the libraries' headers installed"
        )
    return interpreter
