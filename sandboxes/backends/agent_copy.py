"""The agent's programs as they are mounted into a sandbox: a copy with bytecode, which halves the time to start.

Above: the bubblewrap and docker backends. Below: the file system. An installation may have no bytecode (installers
differ), and a sandbox, which cannot write there, would compile everything again at every start.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import marshal
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
            bytecode = Path(importlib.util.cache_from_source(str(copy)))
            bytecode.parent.mkdir(exist_ok=True)
            bytecode.write_bytes(_compiled(copy.read_bytes(), f"{inside}/{path.name}"))
    for path in (aside, *aside.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


class _Unannotated(ast.NodeTransformer):
    """Without the types of functions, which every process would hold for nobody. Those of classes may be used."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node


def _compiled(source: bytes, name: str) -> bytes:
    """The contents of a `.pyc` (PEP 552) with an unchecked hash: what is mounted is never changed, and its time need
    not be kept anywhere. Without texts for people who read it."""
    tree = _Unannotated().visit(ast.parse(source, name))
    code = compile(tree, name, "exec", dont_inherit=True, optimize=2)
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
    return head + marshal.dumps(code)
