"""Where the recipe is (requirement list, Dockerfile, scripts), and digests of it.

In a source checkout it is `images/python`; in an installed wheel it is package data, `sandboxes/images/python`.
Above: the other files of this package. Below: the standard library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from sandboxes.environment.command import BuildFailed

# Raised when builds of the same list come out differently than before, so that what exists counts as stale.
FORMAT = 1

# What an image is built from, beside the requirement list and the base image.
IMAGE_FILES = ("Dockerfile", "install.sh", "verify.py")

_PACKAGE = Path(__file__).resolve().parents[1]
PLACES = (_PACKAGE / "images" / "python", _PACKAGE.parent / "images" / "python")


def recipe_directory() -> Path:
    """The directory with the list, the Dockerfile and their scripts. Raises BuildFailed."""
    for place in PLACES:
        if (place / "requirements.txt").is_file():
            return place
    raise BuildFailed(
        f"the sandbox's requirement list is missing (looked in {' and '.join(map(str, PLACES))}): "
        "this installation is incomplete, install toolhost again"
    )


def list_digest() -> str:
    """SHA-256 (hex) of the requirement list: two environments of one digest offer the same packages."""
    return _digest("requirements.txt")


def image_digest() -> str:
    """SHA-256 (hex) of everything that an image is built from, the base image aside."""
    return _digest("requirements.txt", *IMAGE_FILES)


def _digest(*names: str) -> str:
    sha = hashlib.sha256(f"format {FORMAT}\n".encode())
    for name in names:
        data = (recipe_directory() / name).read_bytes()
        sha.update(f"{name} {len(data)}\n".encode() + data)
    return sha.hexdigest()
