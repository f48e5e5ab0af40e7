"""One cell: source text to code objects, without running anything.

The `ast` module costs several milliseconds to import, and `compile` gives and takes trees without it.
"""

from __future__ import annotations

import _ast

from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType
    from typing import Any

globals()["__builtins__"] = BUILTINS

# Values fixed by CPython: ast.PyCF_ONLY_AST, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, inspect.CO_COROUTINE and
# __future__.annotations.compiler_flag.
_ONLY_AST = 0x400
_TOP_LEVEL_AWAIT = 0x2000
_COROUTINE = 0x80
_FUTURE_ANNOTATIONS = 0x1000000
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_DEFINING_FIELDS = ("name", "asname", "arg")
_LOOP_USERS = {"create_task", "ensure_future", "get_running_loop"}
_LOOP_STARTERS = {"run", "run_until_complete", "run_forever"}


def filename(number: int) -> str:
    """What tracebacks call cell `number`."""
    return f"<cell {number}>"


class Cell:
    """The compiled form of one cell: statements, and the last expression when its value is to be shown.

    `futures` are compiler flags of `from __future__` statements in earlier cells; the attribute has this cell's too.
    Raises SyntaxError (also for null bytes), ValueError, RecursionError or MemoryError: what `compile` raises.
    """

    def __init__(self, source: str, name: str, futures: int = 0) -> None:
        self.source = source
        self.name = name
        self.futures = futures
        self._tree: _ast.Module | None = None
        self.statements: CodeType | None = None
        self.expression: CodeType | None = self._one_expression()
        if self.expression is not None:
            return
        tree = self.tree
        last = tree.body[-1] if tree.body else None
        shown = None
        if isinstance(last, _ast.Expr) and not self._silenced(last):
            shown = _ast.Expression(body=last.value)
            body = _ast.Module(body=tree.body[:-1], type_ignores=[])
        else:
            body = tree
        self.statements = self._code(body, "exec") if body.body else None
        self.expression = self._code(shown, "eval") if shown is not None else None

    @property
    def tree(self) -> _ast.Module:
        """Its syntax."""
        if self._tree is None:
            tree = self._compile(self.source, "exec", _ONLY_AST)
            assert isinstance(tree, _ast.Module)
            self._tree = tree
        return self._tree

    def _one_expression(self) -> CodeType | None:
        """The whole cell's code where it is one expression on one line: a tree costs more than all the rest."""
        source = self.source
        # What can be no expression; what may be warned of, which would be said twice; what only `eval` lets pass.
        if "\n" in source or "=" in source or "\\" in source or source[:1].isspace():
            return None
        try:
            flags = _TOP_LEVEL_AWAIT | self.futures
            code: CodeType = compile(source, self.name, "eval", flags, dont_inherit=True)
        except SyntaxError:
            return None
        return code

    def _compile(self, source: Any, mode: str, flags: int = 0) -> Any:
        return compile(source, self.name, mode, flags | _TOP_LEVEL_AWAIT | self.futures, dont_inherit=True)

    def _code(self, tree: Any, mode: str) -> CodeType:
        code: CodeType = self._compile(tree, mode)
        self.futures |= code.co_flags & _FUTURE_ANNOTATIONS
        return code

    def _silenced(self, last: _ast.Expr) -> bool:
        """A semicolon after the last expression: the value is not to be shown."""
        if ";" not in self.source:
            return False
        lines = self.source.encode("utf-8").splitlines()
        rest = lines[(last.end_lineno or 1) - 1][last.end_col_offset or 0 :]
        return rest.lstrip().startswith(b";")

    def names(self) -> set[str]:
        """Names and attributes that the cell's own top level uses (comprehensions too, function bodies not)."""
        found: set[str] = set()
        todo = [code for code in (self.statements, self.expression) if code is not None]
        while todo:
            code = todo.pop()
            found.update(code.co_names)
            todo += [const for const in code.co_consts if getattr(const, "co_name", "") in _COMPREHENSIONS]
        return found

    @property
    def needs_loop(self) -> bool:
        """Whether the cell must run in an event loop: it awaits, or makes tasks without starting a loop of its own."""
        for code in (self.statements, self.expression):
            if code is not None and is_coroutine(code):
                return True
        if "asyncio" not in self.source and "create_task" not in self.source:
            return False
        names = self.names()
        return not names.isdisjoint(_LOOP_USERS) and names.isdisjoint(_LOOP_STARTERS)

    def uses(self, name: str) -> bool:
        """Whether the cell uses `name` from outside: reads it without defining it anywhere."""
        if name not in self.source:
            return False
        read = False
        for node in walk(self.tree):
            if isinstance(node, _ast.Name) and node.id == name:
                if not isinstance(node.ctx, _ast.Load):
                    return False
                read = True
            elif any(getattr(node, field, None) == name for field in _DEFINING_FIELDS):
                return False
        return read

    def imports(self, package: str) -> bool:
        """Whether an import statement of the cell names `package` or a module in it."""
        if package not in self.source:
            return False
        for node in walk(self.tree):
            names = [node.module or ""] if isinstance(node, _ast.ImportFrom) else []
            if isinstance(node, _ast.Import):
                names = [alias.name for alias in node.names]
            if any(name == package or name.startswith(package + ".") for name in names):
                return True
        return False


def is_coroutine(code: CodeType) -> bool:
    return bool(code.co_flags & _COROUTINE)


def walk(tree: object) -> Iterator[_ast.AST]:
    """Every node of a tree (as `ast.walk`)."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo.extend(node)
        elif isinstance(node, _ast.AST):
            yield node
            todo.extend([getattr(node, field, None) for field in node._fields])


def looks_like_magic(source: str, line: int | None) -> bool:
    """Whether it is for IPython's syntax that a cell is not Python: `%magic`, `!command` or `object?`.

    `line` (from 1) is where the parser stopped; what other lines look like does not count, they may be in a string.
    """
    if source.lstrip().startswith("%%"):
        return True
    lines = source.split("\n")
    text = lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""
    return text.startswith(("%", "!", "?")) or text.endswith("?") or _assigns_magic(text)


def _assigns_magic(text: str) -> bool:
    """`names = !command` and `names = %magic`."""
    return text.partition("=")[2].lstrip().startswith(("%", "!"))
