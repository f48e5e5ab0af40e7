"""The launcher: makes a package of the directory it lies in, wherever that was mounted, and starts a part of it.

    PYTHON -I -B -S toolhost_agent.py CONFIG                      the supervisor; see `wire` for CONFIG
    PYTHON -I -B -S toolhost_agent.py CONFIG early                the same, and its first interpreter started before it
    PYTHON -I -B -S toolhost_agent.py CONFIG early PID FD OTHER   the same, where that was started already: its pid, and
                                                                  both ends of a socket pair: the supervisor's, its own
    PYTHON -I -B toolhost_agent.py early OTHER                    that interpreter
    PYTHON -I -B toolhost_agent.py interpreter FD DATA SITES MODULES   started by the supervisor, never by hand

SITES and MODULES are lists joined by `:`. Nothing but this directory need be there.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def _package() -> str:
    """Imports nothing by search path: user code's directories must not be able to provide our modules."""
    directory = __file__.rpartition("/")[0] or "."
    package = type(sys)("toolhost_agent")
    package.__path__ = [directory]
    sys.modules["toolhost_agent"] = package
    return directory


def interpret(main: Callable[..., None], fd: int, data: str, sites: list[str], modules: list[str]) -> None:
    """Becomes an interpreter. `main`: of `interpreter`."""
    own = next((at for at, entry in enumerate(sys.path) if entry.endswith("-packages")), len(sys.path))
    sys.path[own:own] = sites
    main(fd, data, data + "/.site", modules)


def _start(arguments: list[str]) -> None:
    _package()
    if arguments[0] == "interpreter":
        from toolhost_agent.interpreter import main  # type: ignore[import-not-found]

        fd, data, sites, modules = arguments[1:]
        interpret(main, int(fd), data, _names(sites), _names(modules))
    elif arguments[0] == "early":
        from toolhost_agent.early import wait  # type: ignore[import-not-found]

        wait(int(arguments[1]), interpret)
    else:
        from toolhost_agent.signals import forget_inherited  # type: ignore[import-not-found]

        forget_inherited()
        early = None
        if arguments[1:] == ["early"]:
            from toolhost_agent.early import start

            early = start(__file__)
        elif arguments[1:]:
            from toolhost_agent.early import started

            early = started(*[int(number) for number in arguments[2:]])
        from toolhost_agent.supervisor import main  # type: ignore[import-not-found]

        main(arguments[0], __file__, early)


def _names(joined: str) -> list[str]:
    return [name for name in joined.split(":") if name]


if __name__ == "__main__":
    _start(sys.argv[1:])
