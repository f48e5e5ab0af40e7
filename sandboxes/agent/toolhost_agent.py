"""The launcher: makes a package of the directory it lies in, wherever that was mounted, and starts a part of it.

    PYTHON -I -B -S toolhost_agent.py CONFIG                      the supervisor; see `wire` for CONFIG
    PYTHON -I -B toolhost_agent.py interpreter FD DATA SITES MODULES   started by the supervisor, never by hand

SITES and MODULES are lists joined by `:`. Nothing but this directory need be there.
"""

import sys


def _package() -> str:
    """Imports nothing by search path: user code's directories must not be able to provide our modules."""
    directory = __file__.rpartition("/")[0] or "."
    package = type(sys)("toolhost_agent")
    package.__path__ = [directory]
    sys.modules["toolhost_agent"] = package
    return directory


def _interpret(fd: str, data: str, sites: str, modules: str) -> None:
    from toolhost_agent.interpreter import main  # type: ignore[import-not-found]

    own = next((at for at, entry in enumerate(sys.path) if entry.endswith("-packages")), len(sys.path))
    sys.path[own:own] = [entry for entry in sites.split(":") if entry]
    main(int(fd), data, data + "/.site", [name for name in modules.split(":") if name])


def _start(arguments: list[str]) -> None:
    _package()
    if arguments[0] == "interpreter":
        _interpret(*arguments[1:])
    else:
        from toolhost_agent.supervisor import main  # type: ignore[import-not-found]

        main(arguments[0], __file__)


if __name__ == "__main__":
    _start(sys.argv[1:])
