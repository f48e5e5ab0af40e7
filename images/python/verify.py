"""Imports every module that a requirement list names after "# import"; run by the Python that was built from it.

    python -I verify.py requirements.txt

Prints one line a module that fails, and exits 1 then. Standard library only: it runs in any image.
"""

import importlib
import re
import sys


def named_modules(text: str) -> list[str]:
    """The module names of a requirement list, in its order."""
    return re.findall(r"^[^#\n]+#\s*import\s+([\w.]+)\s*$", text, re.MULTILINE)


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        modules = named_modules(file.read())
    failures = 0
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whatever a module raises, it does not work
            failures += 1
            print(f"cannot import {module}: {type(error).__name__}: {error}")
    if not modules:
        print(f"{path} names no module to import")
    return 1 if failures or not modules else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
