"""Finds the `id` of a JSON-RPC message without holding the message: it may be oversized or malformed.

Above: `sse`, `stdio`. Below: nothing. Memory is bounded by `KEEP`, whatever comes.
"""

from __future__ import annotations

import json
import re
from typing import TypeGuard

KEEP = 512  # of a top-level key or value; a longer one is not an id

_STRUCTURE = re.compile(rb'["{}\[\]:,]')
_STRING_END = re.compile(rb'["\\]')


class IdScanner:
    """Feed it the body's pieces in order; `result` is the top-level `id` (a string or an integer), or None."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._token = bytearray()  # text of the top-level key or value that is being read
        self._overlong = False
        self._key: object = None  # the top-level key whose value is being read
        self.present = False  # a top-level `id` was there, whatever its value
        self.result: str | int | None = None

    def feed(self, data: bytes) -> None:
        position = 0
        while position < len(data) and self.result is None:
            position = self._string(data, position) if self._in_string else self._between(data, position)

    def end(self) -> str | int | None:
        """The id, also when the body ends in the middle of the object."""
        if self.result is None and self._depth == 1:
            self._value()
        return self.result

    def _string(self, data: bytes, position: int) -> int:
        if self._escaped:
            self._escaped = False
            self._keep(data[position : position + 1])
            return position + 1
        found = _STRING_END.search(data, position)
        end = found.start() if found else len(data)
        self._keep(data[position:end])
        if found is None:
            return end
        self._keep(data[end : end + 1])
        if found[0] == b"\\":
            self._escaped = True
        else:
            self._in_string = False
        return end + 1

    def _between(self, data: bytes, position: int) -> int:
        found = _STRUCTURE.search(data, position)
        end = found.start() if found else len(data)
        self._keep(data[position:end])
        if found is None:
            return end
        self._structure(found[0])
        return end + 1

    def _structure(self, mark: bytes) -> None:
        if mark == b'"':
            self._in_string = True
            self._keep(mark)
        elif mark in (b"{", b"["):
            self._depth += 1
            self._token.clear()
            self._overlong = self._depth > 1  # a nested value is no id
        elif mark in (b"}", b"]"):
            if self._depth == 1:
                self._value()
            self._depth -= 1
        elif self._depth == 1 and mark == b":":
            self._key = self._take()
            self.present = self.present or self._key == "id"
        elif self._depth == 1:
            self._value()

    def _value(self) -> None:
        value = self._take()
        if self._key == "id" and can_be_answered(value):
            self.result = value
        self._key = None

    def _take(self) -> object:
        text, overlong = bytes(self._token), self._overlong
        self._token.clear()
        self._overlong = False
        if overlong:
            return None
        try:
            value: object = json.loads(text)
        except ValueError:
            return None
        return value

    def _keep(self, piece: bytes) -> None:
        if self._depth != 1 or self._overlong:
            return
        if len(self._token) + len(piece) > KEEP:
            self._overlong = True
            self._token.clear()
        else:
            self._token += piece


def can_be_answered(value: object) -> TypeGuard[str | int]:
    """Whether this is an id that an answer can carry."""
    if isinstance(value, str):
        return value.isascii() or value.encode("utf-8", "replace").decode() == value  # no lone surrogates: not UTF-8
    return isinstance(value, int) and not isinstance(value, bool)


def has_id(body: bytes) -> bool:
    """Whether a message that is there as a whole has a top-level `id`, of whatever kind."""
    scanner = IdScanner()
    scanner.feed(body)
    return scanner.present


def find_id(body: bytes) -> str | int | None:
    """The id of a message that is there as a whole."""
    scanner = IdScanner()
    scanner.feed(body)
    return scanner.end()


def has_half_characters(message: bytes | str) -> bool:
    """Whether a message is JSON, but for halves of surrogate pairs, which JavaScript sends."""
    try:
        json.dumps(json.loads(message), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        pass
    return False
