"""IPython, loaded into the user's namespace on the first cell that needs it: magics, `!`, `?`, `display`.

Only its syntax, magics and display are used: cells still run in the engine, with its tracebacks and output.
"""

from __future__ import annotations

import os
import sys

from IPython.core.displaypub import DisplayPublisher  # type: ignore[import-not-found, unused-ignore]
from IPython.core.interactiveshell import InteractiveShell  # type: ignore[import-not-found, unused-ignore]
from traitlets.config import Config  # type: ignore[import-not-found, unused-ignore]

from . import pip
from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

globals()["__builtins__"] = BUILTINS

FOLDER = os.path.dirname(os.path.dirname(sys.modules["IPython.core.displaypub"].__file__ or ""))  # noqa: PTH120
"""Where IPython lives: its frames are no more the model's own than the engine's are."""

# Names that it puts into the namespace and that would shadow the real ones, or never be filled.
_UNWANTED = ("exit", "quit", "open", "In", "Out", "_", "__", "___")


class _Publisher(DisplayPublisher):  # type: ignore[misc, unused-ignore]
    """Where `display()` goes."""

    show: Callable[[dict[str, Any]], None]

    def publish(self, data: dict[str, Any], *args: object, **details: object) -> None:
        self.show(data)

    def clear_output(self, wait: bool = False) -> None:
        """Output that has been sent stays."""


class Shell(InteractiveShell):  # type: ignore[misc, unused-ignore]
    """IPython's shell without its execution, history and terminal."""

    failure: BaseException | None = None
    """What a magic that runs code caught and would have printed."""

    def system(self, cmd: str) -> None:
        """`!cmd`: its output goes where all output goes; its exit code to `_exit_code`."""
        import subprocess

        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"  # noqa: PTH110
        command = [shell, "-c", self.var_expand(cmd, depth=1)]
        status = self.user_ns["_exit_code"] = subprocess.call(command, stdin=subprocess.DEVNULL)
        words = cmd.split()
        if status and "pip" in words:
            pip.explain_failure(words[words.index("pip") + 1] if words[-1] != "pip" else "")

    def showtraceback(self, *args: object, **details: object) -> None:
        self.failure = sys.exc_info()[1]

    def showsyntaxerror(self, *args: object, **details: object) -> None:
        self.failure = sys.exc_info()[1]

    def enable_gui(self, gui: object = None) -> None:
        """There is no screen."""


def start(main: ModuleType, show: Callable[[dict[str, Any]], None]) -> Shell:
    """A shell over the namespace of `main`. `show` takes the MIME bundles of `display()`."""
    import tempfile

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "NoColor"
    before = set(vars(main))
    directory = tempfile.mkdtemp(prefix="ipython-")
    shell: Shell = Shell.instance(
        user_module=main, user_ns=vars(main), config=config, ipython_dir=directory, display_pub_class=_Publisher
    )
    shell.display_pub.show = show
    shell.builtin_trap.activate()
    for name in _UNWANTED:
        if name not in before:
            vars(main).pop(name, None)
    shell.set_hook("show_in_pager", _print_page)
    shell.register_magic_function(pip.run, "line", "pip")
    shell.register_magic_function(lambda line: None, "line", "matplotlib")  # figures are inline anyway
    return shell


def _print_page(shell: object, text: Any, start: int = 0, screen_lines: int = 0) -> None:
    print(text["text/plain"] if isinstance(text, dict) else text)
