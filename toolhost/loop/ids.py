"""Ids minted by the loop."""

from __future__ import annotations

import secrets
from typing import Protocol


class IdSource(Protocol):
    """Where ids come from; tests pass one that counts."""

    def new(self, prefix: str) -> str:
        """A fresh id `prefix_…`, unique for ever."""
        ...


class RandomIds:
    """Ids of 128 random bits."""

    def new(self, prefix: str) -> str:
        return f"{prefix}_{secrets.token_hex(16)}"


class CountingIds:
    """Ids that count from 1 for each prefix: equal runs give equal ids."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def new(self, prefix: str) -> str:
        self._counts[prefix] = self._counts.get(prefix, 0) + 1
        return f"{prefix}_{self._counts[prefix]:04d}"
