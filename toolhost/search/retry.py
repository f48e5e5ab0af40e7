"""Retries with jitter inside one deadline, honouring Retry-After. Used by search and by fetching."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

T = TypeVar("T")

# What RFC 9110 and common practice call worth another try.
RETRY_STATUS = frozenset({429, 500, 502, 503, 504})


class Transient(Exception):
    """A failure worth another try; `str(error)` is the reason.

    Attributes:
        status: HTTP status, or 0 for a connection error.
        retry_after: Seconds the server asked to wait, or None.
    """

    def __init__(self, reason: str, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True)
class RetryPolicy:
    """Attempts in all, and the first delay in seconds; each further one is twice as long, times 0.5 to 1."""

    attempts: int = 3
    delay: float = 0.5


async def with_retries(operation: Callable[[], Awaitable[T]], policy: RetryPolicy, deadline: float) -> T:
    """Run `operation` until it succeeds, fails for good, or no try is left.

    Args:
        deadline: Time of the running loop by which a further try must begin.

    Raises:
        Transient: the last failure, when another try would come too late or the attempts are used up.
    """
    loop = asyncio.get_running_loop()
    for attempt in range(policy.attempts):
        try:
            return await operation()
        except Transient as error:
            pause = policy.delay * 2**attempt * random.uniform(0.5, 1.0)
            if error.retry_after is not None:
                pause = max(pause, error.retry_after)
            if attempt + 1 == policy.attempts or loop.time() + pause >= deadline:
                raise
        await asyncio.sleep(pause)
    raise AssertionError("a retry policy has at least one attempt")


def retry_after_seconds(value: str | None) -> float | None:
    """Retry-After (RFC 9110 section 10.2.3): seconds or an HTTP date. None when absent or nonsense."""
    if not value:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(min(int(value[:9]), 86_400))
    try:
        when = parsedate_to_datetime(value)
    except (ValueError, TypeError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
