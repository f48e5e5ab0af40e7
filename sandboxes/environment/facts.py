"""Prints one line of JSON about the Python that runs it. Standard library only: a base image's Python runs it too.

Run as a program by `interpreter.inspect` on the host and by `image` in a container; never imported.
"""

import importlib
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path

# Modules that link against libraries. Loading them makes /proc/self/maps name what a sandbox will have to see, and
# tells whether this Python was built without something that the packages need.
LINKED = ("ssl", "sqlite3", "ctypes", "lzma", "bz2", "zlib", "pyexpat", "decimal", "unicodedata")
# What some systems package apart from Python, and user code may want: to make environments, and extensions. Files of
# the standard library.
APART = ("ensurepip/__init__.py", "venv/__init__.py", "distutils/core.py", "lib2to3/main.py")


def parts() -> list[str]:
    """Which of APART are there, and the headers."""
    library = Path(sysconfig.get_path("stdlib"))
    header = Path(sysconfig.get_path("include", vars={"base": sys.base_prefix}), "Python.h")
    found = [name for name in APART if (library / name).is_file()]
    return [*found, header.name] if header.is_file() else found


def missing_modules() -> list[str]:
    """Which of LINKED cannot be imported."""
    missing = []
    for name in LINKED:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing


def c_library() -> list[str]:
    """Its name and version: ["glibc", "2.36"]. Where it is not glibc it is taken for musl, whose versions all fit."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").split() or ["musl", "1.2"]
    except (ValueError, AttributeError, OSError):
        return ["musl", "1.2"]


def mapped_libraries() -> list[str]:
    """The paths of the shared libraries that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(None, 5)[5] for line in lines if ".so" in line and "/" in line})


def main() -> None:
    """Prints the facts."""
    missing = missing_modules()
    facts = {
        "implementation": sys.implementation.name,
        "version": list(sys.version_info[:3]),
        "machine": platform.machine(),
        "libc": c_library(),
        "prefix": str(Path(sys.base_prefix).resolve()),
        "executable": str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()),
        "missing": missing,
        "parts": parts(),
        "libraries": mapped_libraries(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
