"""The agent's programs as they are mounted into a sandbox: a copy with bytecode, which halves the time to start,
and with bundles of what starts together.

Above: the bubblewrap and docker backends. Below: the file system. An installation may have no bytecode (installers
differ), and a sandbox, which cannot write there, would compile everything again at every start.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import hashlib
import importlib.util
import marshal
import secrets
import shutil
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# What the launcher imports, by the process that it starts.
ENTRIES = {"agent": ("supervisor",), "interpreter": ("interpreter", "lower")}
SHARED = ("early",)  # by both, before they part


def make_agent(root: Path, source: Path, inside: str, python_version: str) -> Path:
    """A copy of the `*.py` in `source`, below `root`, readable by all. Raises OSError.

    It is named by what is in it, so that sandboxes that run keep theirs. `inside`: where it will be mounted.
    `python_version`: of the interpreter in the sandbox, "3.12.1"; bytecode is made when it is the one that runs this.
    """
    programs = sorted(source.glob("*.py"))
    digest = hashlib.sha256(python_version.encode() + Path(__file__).read_bytes())
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
    for path in programs:
        shutil.copyfile(path, aside / path.name)
    if python_version.split(".")[:2] == [str(part) for part in sys.version_info[:2]]:
        trees = {path.stem: _read(path, f"{inside}/{path.name}") for path in programs}
        codes = {name: _compiled(tree, f"{inside}/{name}.py") for name, tree in trees.items()}
        cache = aside / "__pycache__"
        cache.mkdir()
        for path in programs:
            bytecode = cache / Path(importlib.util.cache_from_source(path.name)).name
            bytecode.write_bytes(_cached(codes[path.stem], path.read_bytes()))
        for bundle, names in _bundles(trees).items():
            file = cache / f"{bundle}.{sys.implementation.cache_tag}.bundle"
            file.write_bytes(_bundled({name: codes[name] for name in names}))
    for path in (aside, *aside.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _bundles(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """The modules of each bundle, what is imported before what imports it."""
    begin = {kind: _needed(trees, entries) for kind, entries in ENTRIES.items()}
    shared = _needed(trees, SHARED)
    common = [name for name in begin["agent"] if name in begin["interpreter"] and name not in shared]
    both = [*shared, *common]
    rest = {kind: [name for name in names if name not in both] for kind, names in begin.items()}
    return {"both": both, **rest}


def _needed(trees: Mapping[str, ast.Module], entries: Sequence[str]) -> list[str]:
    """What these modules import when they are imported themselves, and they."""
    found: list[str] = []

    def visit(name: str) -> None:
        if name in trees and name not in found:
            for needed in _imported(trees[name]):
                visit(needed)
            found.append(name)

    for entry in entries:
        visit(entry)
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        alternatives = statement.orelse if isinstance(statement, ast.If) else [statement]  # but for type checkers
        for node in alternatives:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                yield from [node.module] if node.module else [alias.name for alias in node.names]


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


def _read(path: Path, name: str) -> ast.Module:
    tree: ast.Module = _Unannotated().visit(ast.parse(path.read_bytes(), name))
    return tree


def _compiled(tree: ast.Module, name: str) -> types.CodeType:
    """Without texts for people who read it. That annotations are texts is told the compiler: a module that says so
    imports `__future__` for it."""
    body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    told = __future__.annotations.compiler_flag
    code: types.CodeType = compile(ast.Module(body, []), name, "exec", flags=told, dont_inherit=True, optimize=2)
    return code


def _cached(code: types.CodeType, source: bytes) -> bytes:
    """The contents of a `.pyc` (PEP 552) with an unchecked hash: what is mounted is never changed, and its time need
    not be kept anywhere."""
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
    return head + marshal.dumps(code)


def _bundled(codes: Mapping[str, types.CodeType]) -> bytes:
    """As the launcher reads it: which Python it is for, its size, the index with its length before it, the modules."""
    parts = {name: marshal.dumps(code) for name, code in codes.items()}
    index = marshal.dumps([(name, len(part)) for name, part in parts.items()])
    rest = len(index).to_bytes(4, "little") + index + b"".join(parts.values())
    head = importlib.util.MAGIC_NUMBER
    return head + (len(head) + 4 + len(rest)).to_bytes(4, "little") + rest
