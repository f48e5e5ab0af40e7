"""What a bubblewrap sandbox sees of the host: the system, read-only, and the environment for user code.

Above: the bubblewrap backend. Below: the host's file system, of which nothing is shown but what is named here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Top directories with programs and libraries. On most systems all but /usr are links into it.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Parts of /etc without which programs misbehave, and which hold no secret: files are copied, directories mounted.
ETC_FILES = ("ld.so.cache", "ld.so.conf", "localtime", "mime.types", "protocols", "services", "ssl/openssl.cnf")
ETC_DIRECTORIES = ("alternatives", "fonts", "ld.so.conf.d", "ssl/certs", "pki/ca-trust", "pki/tls/certs")
USER = 1000
ETC_TEXTS = {
    "passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\nuser:x:{USER}:{USER}:user:/mnt/data:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": f"root:x:0:\nuser:x:{USER}:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
}


@dataclass(frozen=True, slots=True)
class EmbeddedEnvironment:
    """The Python that user code runs in.

    `python`: its argv prefix, as seen inside. `binds`: host path → path inside, read-only. `site`: directories inside
    that packages are imported from before the interpreter's own. `variables`: what its packages want in the
    environment of user code.
    """

    python: tuple[str, ...]
    binds: Mapping[Path, str] = field(default_factory=dict)
    site: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def system_arguments(root: Path = Path("/")) -> list[str]:
    """Bubblewrap's arguments for the system's directories: links stay links."""
    arguments: list[str] = []
    for name in SYSTEM:
        path = root / name.lstrip("/")
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), name]
    return arguments


def make_etc(target: Path, source: Path = Path("/etc")) -> None:
    """Makes the sandboxes' `/etc`, readable by all, with mount points for `etc_arguments`. Raises OSError."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(mode=0o755, parents=True)
    for name in ETC_DIRECTORIES:
        if (source / name).is_dir():
            (target / name).mkdir(mode=0o755, parents=True)
    for name in ETC_FILES:
        if (source / name).is_file():
            (target / name).parent.mkdir(mode=0o755, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    for name, text in ETC_TEXTS.items():
        (target / name).write_text(text)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def etc_arguments(etc: Path, source: Path = Path("/etc")) -> list[str]:
    """Bubblewrap's arguments for `/etc`. `etc`: where bubblewrap finds what `make_etc` made."""
    arguments = ["--ro-bind", str(etc), "/etc"]
    for name in ETC_DIRECTORIES:
        if (source / name).is_dir():
            arguments += ["--ro-bind", str(source / name), f"/etc/{name}"]
    return arguments
