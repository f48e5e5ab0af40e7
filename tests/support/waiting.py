"""Waits for what others do, with a bound: the one place that looks again and again."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

BOUND_S = 30.0
PAUSE_S = 0.01


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, bound_s: float = BOUND_S) -> None:
    """Returns when the condition holds. Fails with `what` when it does not within the bound."""
    deadline = time.monotonic() + bound_s
    holds = False
    while not holds:
        assert time.monotonic() < deadline, what
        answer = condition()
        holds = bool(await answer) if inspect.isawaitable(answer) else bool(answer)
        await asyncio.sleep(0 if holds else PAUSE_S)
