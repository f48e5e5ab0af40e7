"""Operations that go on to their end once they were begun, though who asked for them is cancelled.

Above: stores over redis-py, here and in the gateway. redis-py waits with `asyncio.wait_for`, which before Python 3.12
returns a result where it was cancelled in that very moment: the caller would go on as if nobody had ended it. Here the
caller waits behind `asyncio.shield`, which always lets a cancellation through.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound="Whole")


class Whole:
    """What has methods that are `whole`."""

    def __init__(self) -> None:
        super().__init__()
        self._working: set[asyncio.Task[Any]] = set()

    async def ended(self, timeout_s: float) -> None:
        """Returns when nothing is under way any more, or after `timeout_s` seconds."""
        if self._working:
            await asyncio.wait(self._working, timeout=timeout_s)

    def _note_end(self, work: asyncio.Task[Any]) -> None:
        self._working.discard(work)
        if not work.cancelled():
            work.exception()  # whoever waits for it gets it; if nobody does any more, it is of no interest


def whole(
    method: Callable[Concatenate[W, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[W, P], Coroutine[Any, Any, T]]:
    """See the module."""

    @functools.wraps(method)
    async def begun(self: W, /, *args: P.args, **kwargs: P.kwargs) -> T:
        work = asyncio.create_task(method(self, *args, **kwargs))
        self._working.add(work)
        work.add_done_callback(self._note_end)
        return await asyncio.shield(work)

    return begun
