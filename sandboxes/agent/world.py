"""What every cell may count on, put back after whatever the cell before did to it."""

from __future__ import annotations

import builtins
import os
import sys

from . import pristine
from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from .streams import Streams

globals()["__builtins__"] = BUILTINS

# Below this the engine's own calls fail.
_LOWEST_RECURSION_LIMIT = 200


class World:
    """The `__main__` module of user code, and the parts of the process that cells share with the engine."""

    def __init__(self, streams: Streams, home: str) -> None:
        self.streams = streams
        self._home = home
        self._modules = sys.modules
        self.path = list(sys.path)
        self._hook: object = None
        self._recursion_limit = sys.getrecursionlimit()
        self.main: ModuleType = type(sys)("__main__")
        self.namespace = vars(self.main)
        self.namespace.update(__builtins__=builtins, __doc__=None)
        self._trace: object = None
        self._profile: object = None

    def prepare(self) -> str | None:
        """Before a cell. Returns a sentence for the model when something it relies on had to change."""
        self.streams.restore()
        if self._modules.get("__main__") is not self.main:
            self._modules["__main__"] = self.main
        self.namespace["__builtins__"] = builtins
        self.namespace.pop("__warningregistry__", None)  # else the same warning in a later cell is not shown
        try:
            os.getcwd()
        except OSError:
            return self._go_home()
        return None

    def _go_home(self) -> str:
        for place in (self._home, "/"):
            try:
                os.chdir(place)
            except OSError:
                continue
            return f"The working directory had been removed; it is {place} now."
        return "The working directory had been removed."

    def suspend_tracing(self) -> None:
        """Takes user code's trace and profile functions off the engine's own code."""
        self._trace, self._profile = sys.gettrace(), sys.getprofile()
        if self._trace is not None:
            sys.settrace(None)
        if self._profile is not None:
            sys.setprofile(None)

    def resume_tracing(self) -> None:
        if self._trace is not None:
            sys.settrace(self._trace)  # type: ignore[arg-type]
        if self._profile is not None:
            sys.setprofile(self._profile)  # type: ignore[arg-type]

    def repair(self) -> str | None:
        """After a cell. Returns a sentence that names what was put back."""
        repaired = []
        if self.streams.restore():
            repaired.append("standard streams")
        if self._repair_builtins():
            repaired.append("builtins")
        if self._repair_modules():
            repaired.append("sys.modules")
        if type(sys.path) is not list:
            sys.path = list(self.path)
            repaired.append("sys.path")
        if sys.getrecursionlimit() < _LOWEST_RECURSION_LIMIT:
            sys.setrecursionlimit(self._recursion_limit)
            repaired.append("recursion limit")
        return f"Put back after this cell: {', '.join(repaired)}." if repaired else None

    def _repair_builtins(self) -> bool:
        """Puts back what is gone or no longer callable; a `print` of the user's own stays."""
        current = vars(builtins)
        broken = [
            name
            for name, value in BUILTINS.items()
            if current.get(name) is not value and (name not in current or (callable(value) and not callable(current[name])))
        ]
        for name in broken:
            current[name] = BUILTINS[name]
        return bool(broken)

    def _repair_modules(self) -> bool:
        replaced = sys.modules is not self._modules
        sys.modules = self._modules
        missing = [name for name in pristine.MODULES if name not in self._modules]
        for name in missing:
            self._modules[name] = pristine.MODULES[name]
        return replaced or bool(missing)
