"""What the launcher starts: the supervisor or an interpreter, by its arguments.

    PYTHON -I -B -S toolhost_agent.py CONFIG         the supervisor; see `wire` for CONFIG
    PYTHON -I -B -S toolhost_agent.py CONFIG early   the same, and its first interpreter started before it
    PYTHON -I -B toolhost_agent.py early             that interpreter, started by it, never by hand
    PYTHON -I -B toolhost_agent.py CONFIG fork       the supervisor, its first interpreter forked from it
    PYTHON -I -B toolhost_agent.py interpreter FD DATA SITES MODULES   started by the supervisor, never by hand

SITES and MODULES are lists joined by `:`.

Above: `toolhost_agent`. Below: `early`, `supervisor`, `interpreter`.
"""

from __future__ import annotations

import marshal
import posix
import sys

_INT_BYTES = 4
_FLAGS = posix.O_RDONLY | posix.O_CLOEXEC

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def _load(bundle: str) -> None:
    """Imports the modules of a bundle at once, which takes a third less time than to look for each. Where whoever
    mounts this has made none for this Python, they are imported as they are needed."""
    package = sys.modules["toolhost_agent"]
    directory = package.__path__[0]
    try:
        fd = posix.open(f"{directory}/__pycache__/{bundle}.{sys.implementation.cache_tag}.bundle", _FLAGS)
    except OSError:
        return
    magic = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER
    head = posix.read(fd, len(magic) + _INT_BYTES)
    if head == magic + posix.fstat(fd).st_size.to_bytes(_INT_BYTES, "little"):  # of this Python, and whole
        index = int.from_bytes(posix.read(fd, _INT_BYTES), "little")
        for name, length in marshal.loads(posix.read(fd, index)):
            code = posix.read(fd, length)  # each by itself: what is large leaves a gap where it was
            whole = f"toolhost_agent.{name}"
            if whole not in sys.modules:
                module = type(sys)(whole)
                module.__file__ = f"{directory}/{name}.py"
                module.__package__ = "toolhost_agent"
                sys.modules[whole] = module
                exec(marshal.loads(code), vars(module))
                setattr(package, name, module)
    posix.close(fd)


def interpreter() -> Callable[[int, str, list[str], list[str]], None]:
    """Imports what makes this process an interpreter; what is returned does, and never returns."""
    _load("interpreter")
    from .interpreter import main

    def interpret(fd: int, data: str, sites: list[str], modules: list[str]) -> None:
        own = next((at for at, entry in enumerate(sys.path) if entry.endswith("-packages")), len(sys.path))
        sys.path[own:own] = sites
        main(fd, data, data + "/.site", modules)

    return interpret


def start(launcher: str, arguments: list[str]) -> None:
    """The process. `launcher`: the program that is run, with these arguments."""
    _load("both")
    if arguments[0] == "interpreter":
        fd, data, sites, modules = arguments[1:]
        interpreter()(int(fd), data, _names(sites), _names(modules))
    elif arguments == ["early"]:
        from .early import wait

        wait(interpreter)
    else:
        _supervise(launcher, *arguments)


def _supervise(launcher: str, source: str, first: str = "") -> None:
    from .signals import forget_inherited

    forget_inherited()
    early = None
    if first == "early":
        from .early import execute

        early = execute(launcher)
    elif first == "fork":
        from .early import fork

        early = fork(interpreter)
    _load("agent")
    from .supervisor import main

    main(source, launcher, early)


def _names(joined: str) -> list[str]:
    return [name for name in joined.split(":") if name]
