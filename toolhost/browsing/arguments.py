"""Tool arguments as models send them: `1.0`, `"1"`, null. Coerced, or refused with a text that says what is meant."""

from __future__ import annotations

import re

from toolhost.browsing.errors import BrowserError
from toolhost.browsing.page import one_line

_INTEGER = re.compile(r"\s*([+-]?\d{1,18})(?:\.0*)?\s*", re.ASCII)


def as_integer(value: object, name: str, default: int) -> int:
    """`value` as an integer. None and "" mean `default`; `1.0`, `"1"` and `"1.0"` mean 1.

    Raises:
        BrowserError: anything else.
    """
    if value is None or value == "":
        return default
    if isinstance(value, str) and value.strip().lower() in ("null", "none"):
        return default
    number = integer_or_none(value)
    if number is None:
        raise BrowserError(f"Invalid `{name}` parameter: `{shown(value)}`. It must be an integer.")
    return number


def integer_or_none(value: object) -> int | None:
    """The integer a value stands for, or None when it stands for none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if abs(value) < 10**18 else None
    if isinstance(value, float):
        return int(value) if abs(value) < 10**15 and value == int(value) else None
    if isinstance(value, str) and (match := _INTEGER.fullmatch(value)):
        return int(match.group(1))
    return None


def as_flag(value: object, default: bool = False) -> bool:
    """`value` as a truth value; strings as models write them."""
    if value is None:
        return default
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes", "on")
    return bool(value)


def as_text(value: object, name: str) -> str:
    """`value` as text: strings as they are, numbers written out.

    Raises:
        BrowserError: missing, empty or only white space, or neither text nor number.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise BrowserError(f"Invalid `{name}` parameter: `{shown(value)}`. It must be a non-empty string.")
    return value


def shown(value: object) -> str:
    """A hostile value, short and on one line, for an error text."""
    return one_line(str(value) if isinstance(value, (str, int, float)) else type(value).__name__, 100)
