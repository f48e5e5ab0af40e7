"""What a bubblewrap sandbox sees of the host's system: programs, libraries, and the harmless parts of `/etc`.

Above: the bubblewrap backend. Below: the host's file system, of which nothing is shown but what is named here.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
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


def make_etc(root: Path, source: Path = Path("/etc")) -> Path:
    """Makes the sandboxes' `/etc` in `root`, readable by all, with mount points for `etc_arguments`. Raises OSError.

    It is named by what is in it: when the system has changed since the last time, sandboxes that run keep theirs.
    """
    aside = root / f"etc.{secrets.token_hex(4)}"
    try:
        return _made(aside, root, source)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # what is left of it where the disk was full, or where it was made


def _made(aside: Path, root: Path, source: Path) -> Path:
    aside.mkdir(mode=0o755)
    for name in ETC_DIRECTORIES:
        if (source / name).is_dir():
            (aside / name).mkdir(parents=True)
    for name in ETC_FILES:
        if (source / name).is_file():
            (aside / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, aside / name)
    for name, text in ETC_TEXTS.items():
        (aside / name).write_text(text)
    digest = hashlib.sha256()
    for path in sorted((aside, *aside.rglob("*"))):
        directory = path.is_dir()
        path.chmod(0o755 if directory else 0o644)
        digest.update(f"{path.relative_to(aside)}\0".encode())
        digest.update(b"" if directory else path.read_bytes())
    made = root / f"etc-{digest.hexdigest()[:16]}"
    if not made.is_dir():
        with contextlib.suppress(OSError):  # another host was quicker
            aside.rename(made)
    return made


def etc_arguments(etc: Path, source: Path = Path("/etc")) -> list[str]:
    """Bubblewrap's arguments for `/etc`. `etc`: where bubblewrap finds what `make_etc` made."""
    arguments = ["--ro-bind", str(etc), "/etc"]
    for name in ETC_DIRECTORIES:
        if (source / name).is_dir():
            arguments += ["--ro-bind", str(source / name), f"/etc/{name}"]
    return arguments
