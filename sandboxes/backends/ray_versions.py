"""What must be the same on every machine of a cluster, as this process has it.

Above: `ray_node` (a node says it), `toolhost cluster status` (compares). Below: the standard library.
"""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = ("ray", "toolhost")


def versions() -> dict[str, str]:
    """Versions by name: `python`, `ray`, `toolhost`. A package that is not installed as one has the version ""."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a clone
        return ""
