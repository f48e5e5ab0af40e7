"""The launcher: makes a package of the directory it lies in, wherever that was mounted, and starts a part of it.

    PYTHON -I -B [-S] toolhost_agent.py ARGUMENT...   see `starting`

Nothing but this directory need be there. It is the one program that is compiled at every start: all else is elsewhere.
"""

import sys


def _package() -> None:
    """Imports nothing by search path: user code's directories must not be able to provide our modules."""
    package = type(sys)("toolhost_agent")
    package.__path__ = [__file__.rpartition("/")[0] or "."]
    sys.modules["toolhost_agent"] = package


if __name__ == "__main__":
    _package()
    from toolhost_agent.starting import start  # type: ignore[import-not-found]

    start(__file__, sys.argv[1:])
