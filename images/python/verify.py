"""Imports every module that a requirement list names after "# import"; run by the Python that was built from it.

    python -I verify.py requirements.txt

Prints one line a module that fails, and exits 1 then. Standard library only: it runs in any image.
"""

import importlib
import re
import sys
from pathlib import Path


def named_modules(text: str) -> list[str]:
    """The module names of a requirement list, in its order."""
    return re.findall(r"^[^#\n]+#\s*import\s+([\w.]+)\s*$", text, re.MULTILINE)


def main(path: str) -> int:
    modules = named_modules(Path(path).read_text(encoding="utf-8"))
    failures = 0
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whatever a module raises, it does not work
            failures += 1
            # numpy explains at length and gives the reason last.
            reason = (str(error).strip().splitlines() or [""])[-1]
            print(f"cannot import {module}: {type(error).__name__}: {reason}")
    if not modules:
        print(f"{path} names no module to import")
    return 1 if failures or not modules else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
