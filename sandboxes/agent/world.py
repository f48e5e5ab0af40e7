"""What every cell may count on, put back after whatever the cell before did to it."""

from __future__ import annotations

import _thread
import builtins
import sys
from itertools import islice
from sys import getprofile, getrecursionlimit, gettrace, setprofile, setrecursionlimit, settrace

from . import pristine
from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from types import CodeType, ModuleType
    from typing import Any

    from .interrupts import Interrupts
    from .streams import Streams
else:
    from .pristine import OS as os

globals()["__builtins__"] = BUILTINS

# Below this the engine's own calls fail.
_LOWEST_RECURSION_LIMIT = 200
# As they follow each other in their dictionaries while nobody has taken one away: to compare these with what is there
# now looks at no name, and costs a fraction of looking each of them up.
_VALUES = tuple(BUILTINS.values())


class World:
    """The `__main__` module of user code, and the parts of the process that cells share with the engine."""

    def __init__(self, streams: Streams, home: str) -> None:
        self.streams = streams
        self._home = home
        self._modules = sys.modules
        self.path = list(sys.path)
        self._recursion_limit = getrecursionlimit()
        self.main: ModuleType = type(sys)("__main__")
        self.namespace = vars(self.main)
        self.namespace.update(__builtins__=builtins, __doc__=None)
        self._disturbed = True
        self._played = False
        self._names: tuple[str, ...] = ()
        self._trace: Any = None
        self._profile: Any = None

    def prepare(self) -> str | None:
        """Before a cell. Returns a sentence for the model when something it relies on had to change."""
        if self._disturbed or self._played or _thread._count():
            self.streams.restore()
        else:
            self.streams.restore_objects()
        if self._modules.get("__main__") is not self.main:
            self._modules["__main__"] = self.main
        self.namespace["__builtins__"] = builtins
        self.namespace.pop("__warningregistry__", None)  # else the same warning in a later cell is not shown
        try:
            os.getcwd()
        except OSError:
            return self._go_home()
        return None

    def disturbed(self) -> None:
        """Something of the user's ran between two cells: what the last repair has found may not be so any more."""
        self._disturbed = True

    def _go_home(self) -> str:
        for place in (self._home, "/"):
            try:
                os.chdir(place)
            except OSError:
                continue
            return f"The working directory had been removed; it is {place} now."
        return "The working directory had been removed."

    def call(self, code: CodeType, interrupts: Interrupts) -> object:
        """Runs compiled code in the namespace: interruptible, and alone under user code's trace and profile functions.

        Raises what the code raises. Between the two settings of the trace function only C functions are called: the
        user's would run for, and could raise in, any other.
        """
        try:
            interrupts.armed = True
            if self._trace is not None:
                settrace(self._trace)
            if self._profile is not None:
                setprofile(self._profile)
            return eval(code, self.namespace)
        finally:
            self._profile = getprofile()
            if self._profile is not None:
                setprofile(None)
            self._trace = gettrace()
            if self._trace is not None:
                settrace(None)
            interrupts.armed = False

    def stop_tracing(self) -> None:
        """Takes trace and profile functions off the engine's code, that a cell in the event loop left there."""
        if gettrace() is not None or getprofile() is not None:
            settrace(None)
            setprofile(None)

    def repair(self) -> str | None:
        """After a cell. Returns a sentence that names what was put back."""
        repaired = []
        self._disturbed = False
        if self.streams.restore():
            # A stream of the user's that goes only now takes its descriptor with it.
            self._played = True
            repaired.append("standard streams")
        if self._repair_builtins():
            repaired.append("builtins")
        if self._repair_modules():
            repaired.append("sys.modules")
        if type(sys.path) is not list:
            sys.path = list(self.path)
            repaired.append("sys.path")
        if getrecursionlimit() < _LOWEST_RECURSION_LIMIT:
            setrecursionlimit(self._recursion_limit)
            repaired.append("recursion limit")
        return f"Put back after this cell: {', '.join(repaired)}." if repaired else None

    def _repair_builtins(self) -> bool:
        """Puts back what is gone or no longer callable; a `print` of the user's own stays."""
        current = vars(builtins)
        if tuple(islice(current.values(), len(_VALUES))) == _VALUES or BUILTINS.items() <= current.items():
            return False
        broken = [
            name
            for name, value in BUILTINS.items()
            if current.get(name) is not value
            and (name not in current or (callable(value) and not callable(current[name])))
        ]
        for name in broken:
            current[name] = BUILTINS[name]
        return bool(broken)

    def _repair_modules(self) -> bool:
        replaced = sys.modules is not self._modules
        sys.modules = self._modules
        if len(self._names) != len(pristine.MODULES):
            self._names = tuple(pristine.MODULES)
        if not replaced and (
            tuple(islice(self._modules, len(self._names))) == self._names
            or pristine.MODULES.keys() <= self._modules.keys()
        ):
            return False
        missing = [name for name in pristine.MODULES if name not in self._modules]
        for name in missing:
            self._modules[name] = pristine.MODULES[name]
        return replaced or bool(missing)
