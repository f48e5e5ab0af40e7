"""Ctrl-C, the same for every command: the first one ends what runs in order, a second one ends the process at once.

Above: `__main__`, which takes Ctrl-C before anything slow is loaded, and the commands. Below: the standard library.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

INTERRUPTED = 130  # exit code
SAME_SIGNAL_S = 0.5  # a terminal and a wrapper (make, timeout) both pass one Ctrl-C on: that is one
SHOW_CURSOR = "\x1b[?25h"  # a live view hides it
Act = Callable[[], object]


class Interrupts:
    """The handler of a process's interrupts. The first one calls `act`, in the main thread, wherever that is."""

    def __init__(self) -> None:
        self._act: Act = _raise
        self._left = "toolhost: ended at once"
        self._first_at: float | None = None

    def __call__(self, _number: int, _frame: object) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._act()
        elif now - self._first_at >= SAME_SIGNAL_S:
            self._end()

    def _end(self) -> None:
        """Nothing of the process's own clean-up runs: it may be what hangs."""
        try:
            shown = SHOW_CURSOR if os.isatty(2) else ""
            os.write(2, f"{shown}{self._left}\n".encode())
        except OSError:
            pass  # nobody reads it
        os._exit(INTERRUPTED)

    @contextmanager
    def acting(self, act: Act, left: str) -> Iterator[None]:
        before = self._act, self._left
        self._act, self._left = act, left or self._left
        try:
            yield
        finally:
            self._act, self._left = before


def take() -> None:
    """From here on the first Ctrl-C raises KeyboardInterrupt, and a second one ends the process. Where Ctrl-C is
    ignored (a script's background job), it stays so, for what is `run` too."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, Interrupts())


@contextmanager
def first(act: Act, *signals: signal.Signals, left: str = "") -> Iterator[None]:
    """Within it, the first Ctrl-C, or the first of `signals`, calls `act` between two instructions of the main thread.

    `left`: what the second one says before it ends the process. For the main thread.
    """
    known = signal.getsignal(signal.SIGINT)
    handler = known if isinstance(known, Interrupts) else Interrupts()
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, *signals)}
    try:
        with handler.acting(act, left):
            yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`: the first Ctrl-C cancels `work`, and raises KeyboardInterrupt when that has cleaned up."""
    import asyncio  # here: what Ctrl-C needs at the start is to be loaded at once

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return asyncio.run(work)
    interrupted = False

    async def main() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel() -> None:
            nonlocal interrupted
            interrupted = True
            loop.call_soon_threadsafe(task.cancel)

        with first(cancel):
            return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise


def _raise() -> None:
    raise KeyboardInterrupt
