"""What the engine relies on, bound before user code can touch it.

User code shares the engine's process and may replace `builtins.compile`, clear `sys.modules`, or put a `traceback.py`
of its own on the path. A function looks up builtins in its module's `__builtins__`, so an engine module that sets
that to `BUILTINS` (before it defines a function) keeps working whatever happens to the real ones.
"""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

BUILTINS = dict(vars(builtins))
globals()["__builtins__"] = BUILTINS

MODULES = dict(sys.modules)
OS = type(sys)("os")
# A worker of the agent's, which has only the C half, also looks for changed files.
vars(OS).update(vars(sys.modules.get("os") or sys.modules["posix"]))
PATH = list(sys.path)
FINDERS = list(sys.meta_path)
_STDLIB: str = vars(OS).get("__file__", "").rpartition("/")[0]
_loaded: dict[str, ModuleType] = {}


def load(name: str) -> ModuleType:
    """The standard library's module `name`, imported now if need be, never a user's file or object of that name."""
    if name in _loaded:
        return _loaded[name]
    theirs = {}
    found = sys.modules.get(name)
    if found is not None and not _is_standard(found):
        theirs[name] = sys.modules.pop(name)
    path, sys.path = sys.path, list(PATH)
    finders, sys.meta_path = sys.meta_path, list(FINDERS)
    try:
        module: ModuleType = __import__(name, fromlist=("*",))
    finally:
        sys.path, sys.meta_path = path, finders
        sys.modules.update(theirs)
    _loaded[name] = module
    return module


def _is_standard(module: object) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is None or (type(origin) is str and origin.startswith(_STDLIB) and "site-packages" not in origin)
