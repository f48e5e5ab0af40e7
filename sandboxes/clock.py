"""Time as a dependency, so that tests can turn it.

Above: everything that waits for a length of time rather than for an event. Below: the standard library.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the host reads and waits by."""

    def now(self) -> float:
        """Seconds since the epoch."""

    async def sleep(self, seconds: float) -> None:
        """Returns after that long. Cancellable."""


class SystemClock:
    """The machine's."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
