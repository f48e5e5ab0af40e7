"""Text for the model out of values and messages: bounded, and always encodable."""

from __future__ import annotations

from .pristine import BUILTINS

globals()["__builtins__"] = BUILTINS


def clean(text: str) -> str:
    """`text` as a plain str without lone surrogates (they cannot be sent as UTF-8; shown as escapes)."""
    if type(text) is str and text.isascii():
        return text
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")


def cut(text: str, cap: int) -> str:
    """`text`, or its first and last `cap` / 2 characters with the count of what was cut between."""
    text = clean(text)
    if len(text) <= cap:
        return text
    head = cap // 2
    tail = cap - head
    return f"{text[:head]}\n... [{len(text) - cap:,} characters cut] ...\n{text[len(text) - tail :]}"


def show(value: object, cap: int) -> str:
    """`repr(value)`, bounded. Raises what the value's `__repr__` raises.

    The built-in collections that could not fit are never written out whole: the repr of a list of a hundred million
    numbers takes gigabytes and cannot be interrupted.
    """
    kind = type(value)
    if (kind is str or kind is bytes or kind is bytearray or kind is list or kind is tuple) and len(value) > cap:  # type: ignore[arg-type]
        return _show_ends(value, cap)  # type: ignore[arg-type]
    if (kind is dict or kind is set or kind is frozenset) and len(value) > cap:  # type: ignore[arg-type]
        return _show_start(value, cap)  # type: ignore[arg-type]
    return cut(repr(value), cap)


def _show_ends(value: str | bytes | bytearray | list[object] | tuple[object, ...], cap: int) -> str:
    half = max(cap // 2, 1)
    unit = "characters" if isinstance(value, str) else "bytes" if isinstance(value, bytes | bytearray) else "items"
    head, tail = repr(value[:half])[:half], repr(value[-half:])[-half:]
    return clean(f"{head}\n... [cut: {len(value):,} {unit} in all] ...\n{tail}")


def _show_start(value: dict[object, object] | set[object] | frozenset[object], cap: int) -> str:
    items = []
    for item in value.items() if isinstance(value, dict) else value:
        items.append(item)
        if len(items) == cap:
            break
    start = repr(dict(items) if isinstance(value, dict) else set(items))  # type: ignore[arg-type]
    return clean(f"{start[:cap]}\n... [cut: {len(value):,} items in all]")
