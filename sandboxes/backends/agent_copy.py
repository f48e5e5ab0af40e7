"""The agent's programs as they are mounted into a sandbox: a copy with bytecode, which halves the time to start.

Above: the bubblewrap and docker backends. Below: the file system. An installation may have no bytecode (installers
differ), and a sandbox, which cannot write there, would compile everything again at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import py_compile
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def make_agent(root: Path, source: Path, inside: str, python_version: str) -> Path:
    """A copy of the `*.py` in `source`, below `root`, readable by all. Raises OSError.

    It is named by what is in it, so that sandboxes that run keep theirs. `inside`: where it will be mounted.
    `python_version`: of the interpreter in the sandbox, "3.12.1"; bytecode is made when it is the one that runs this.
    """
    programs = sorted(source.glob("*.py"))
    digest = hashlib.sha256(python_version.encode())
    for path in programs:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    made = root / f"agent-{digest.hexdigest()[:16]}"
    if made.exists():
        return made
    aside = root / f"agent.{secrets.token_hex(4)}"
    try:
        _copy(programs, aside, inside, python_version)
        with contextlib.suppress(OSError):  # another host was quicker
            aside.rename(made)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # what is left of it where the disk was full
    return made


def _copy(programs: Sequence[Path], aside: Path, inside: str, python_version: str) -> None:
    aside.mkdir(mode=0o755)
    same = python_version.split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    for path in programs:
        copy = aside / path.name
        shutil.copyfile(path, copy)
        if same:
            # An unchecked hash: what is mounted is never changed, and its time need not be kept anywhere.
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(
                str(copy),
                cfile=importlib.util.cache_from_source(str(copy)),
                dfile=f"{inside}/{path.name}",
                doraise=True,
                optimize=2,  # without texts for people who read it, which every process would hold
                invalidation_mode=mode,
            )
    for path in (aside, *aside.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
