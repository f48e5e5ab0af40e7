"""The text of every cell, where tracebacks, warnings and `inspect` look for it: `linecache`.

`linecache` costs several milliseconds to import, so it is filled when user code (or a traceback) first imports it.
"""

from __future__ import annotations

import sys

from . import pristine
from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

globals()["__builtins__"] = BUILTINS

# Enough for any session that a person would follow; a loop of large cells must not fill the memory.
_CHARACTERS_KEPT = 8 << 20


class Sources:
    """File name → source text of the cells, oldest dropped beyond a bound (in characters)."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._size = 0

    def add(self, name: str, text: str) -> None:
        self._size += len(text) - len(self._texts.pop(name, ""))
        self._texts[name] = text
        while self._size > _CHARACTERS_KEPT and len(self._texts) > 1:
            oldest = next(iter(self._texts))
            self._size -= len(self._texts.pop(oldest))
            linecache = sys.modules.get("linecache")
            getattr(linecache, "cache", {}).pop(oldest, None)
        linecache = sys.modules.get("linecache")
        if linecache is not None:
            self._enter(linecache, name)

    def fill(self, linecache: ModuleType) -> None:
        """Enters every cell (again): called when `linecache` is first imported and before a traceback is shown."""
        for name in self._texts:
            self._enter(linecache, name)

    def _enter(self, linecache: ModuleType, name: str) -> None:
        cache = getattr(linecache, "cache", None)
        if isinstance(cache, dict) and name not in cache:
            text = self._texts[name]
            lines = [line + "\n" for line in text.split("\n")]
            cache[name] = (len(text), None, lines, name)

    def line(self, name: str, number: int) -> str | None:
        """Line `number` (from 1) of a cell."""
        lines = self._texts.get(name, "").split("\n")
        return lines[number - 1] if 0 < number <= len(lines) else None


class AfterImport:
    """An import hook that acts once a module has been imported, and leaves the importing to the usual finders."""

    def __init__(self, actions: dict[str, object]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name not in self._actions:
            return None
        finders: list[object] = list(sys.meta_path)
        for finder in finders:
            find = getattr(finder, "find_spec", None)
            if find is None or isinstance(finder, AfterImport):
                continue
            spec = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._actions[name])
                return spec
        return None


class _Loader:
    """A module's own loader, and an action after it."""

    def __init__(self, loader: object, action: object) -> None:
        self._own = loader
        self._action = action

    def __getattr__(self, name: str) -> object:
        return getattr(self._own, name)

    def create_module(self, spec: object) -> object:
        return self._own.create_module(spec)  # type: ignore[attr-defined]

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own  # type: ignore[assignment]
        if module.__spec__ is not None:
            module.__spec__.loader = self._own  # type: ignore[assignment]
        self._own.exec_module(module)  # type: ignore[attr-defined]
        self._action(module)  # type: ignore[operator]


def load_linecache(sources: Sources) -> ModuleType:
    """`linecache` with every cell in it."""
    linecache = pristine.load("linecache")
    sources.fill(linecache)
    return linecache
