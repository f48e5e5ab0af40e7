"""Checks on what goes in and what comes out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

BATCH = 200
"""Characters of text that an output check sees at a time."""


Annotate = Callable[[str], Awaitable[list[dict[str, Any]]]]
"""`annotate(text)` gives the annotations of a finished text, in the Responses API's shape: what it cites."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """A check's refusal; `reason` is what the user is told."""

    reason: str


Check = Callable[[str], Refuse | Awaitable[Refuse | None] | None]
"""`check(text)` allows by returning None. It may be a plain or an async function."""


async def ask(check: Check | None, text: str) -> Refuse | None:
    """Run a check; no check allows everything."""
    if check is None or not text:
        return None
    verdict = check(text)
    return await verdict if inspect.isawaitable(verdict) else verdict


class Gate:
    """Holds text back until a check has allowed it, in batches of `BATCH` characters. Without a check it is open."""

    def __init__(self, check: Check | None) -> None:
        self._check = check
        self._held = ""

    async def write(self, text: str) -> tuple[str, Refuse | None]:
        """What may be delivered now, and the refusal if there was one (nothing follows it)."""
        if self._check is None:
            return text, None
        self._held += text
        allowed = ""
        while len(self._held) >= BATCH:
            batch, self._held = self._held[:BATCH], self._held[BATCH:]
            refusal = await ask(self._check, batch)
            if refusal is not None:
                self._held = ""
                return allowed, refusal
            allowed += batch
        return allowed, None

    async def flush(self) -> tuple[str, Refuse | None]:
        """The rest, at the end of a text."""
        rest, self._held = self._held, ""
        refusal = await ask(self._check, rest)
        return ("", refusal) if refusal is not None else (rest, None)
