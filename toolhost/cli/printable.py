"""Text from elsewhere on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Text of a model or a tool without the control characters by which it could drive a terminal."""
    return "".join(char for char in text if char in "\n\t" or (char.isprintable() and char != "\x7f"))
