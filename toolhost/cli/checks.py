"""What several commands check of their options: what is wrong with one is a line, and exit code 2.

Above: the commands. Below: `identity`, `serve.fail`.
"""

from __future__ import annotations

from pathlib import Path

from toolhost.cli.serve import fail
from toolhost.identity import SESSION_ID


def session_id(text: str) -> None:
    """Refuse a --session that a tool host would not take."""
    if not SESSION_ID.fullmatch(text):
        fail("--session takes 1 to 128 characters of A-Z a-z 0-9 . _ : -")


def utf8(text: str, what: str) -> None:
    """Refuse text that came as bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        fail(f"{what} cannot be sent: not UTF-8 text")


def secret(file: Path, what: str) -> str:
    """The secret in a file, which goes into a header; `what` names its kind."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        fail(f"cannot read the {what} in {file}: {error.strerror or error}")
    except UnicodeDecodeError:
        text = ""
    if not text.isascii() or not text.isprintable() or not text:
        fail(f"{file} must hold a {what} and nothing else")
    return text
