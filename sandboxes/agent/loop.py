"""A single-threaded event loop: descriptors, timers, signals. `selectors` and `asyncio` cost more than the agent.

Above: everything in the agent that waits. Below: epoll.
"""

from __future__ import annotations

import select
import sys
from time import monotonic

from .signals import signal
from .system import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
_BROKEN = select.EPOLLHUP | select.EPOLLERR


class Timer:
    """A call that is due at `at` (monotonic seconds) until it is cancelled."""

    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call = call


class Loop:
    """One per process. A callback that raises is reported on stderr and ends nothing."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[int], None]] = {}
        self._events: dict[int, int] = {}
        self._timers: set[Timer] = set()
        self._soon: list[Callable[[], None]] = []
        self._signals: dict[int, Callable[[], None]] = {}
        self._stopped = False
        self._due = 0.0  # when the next timer goes off, as it was when the loop began to wait
        self._wake_in, wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(wake_out, False)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        self.watch(self._wake_in, READ, self._woken)

    # --- descriptors

    def watch(self, fd: int, events: int, call: Callable[[int], None]) -> None:
        """Calls `call(events)` while `fd` is ready; watching it again changes both."""
        known = self._events.get(fd)
        if known is None:
            self._epoll.register(fd, events)
        elif known != events:
            self._epoll.modify(fd, events)
        self._events[fd] = events
        self._calls[fd] = call

    def forget(self, fd: int) -> None:
        """Stops watching. Must come before the descriptor is closed."""
        if self._calls.pop(fd, None) is not None:
            del self._events[fd]
            self._epoll.unregister(fd)

    # --- time

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(monotonic() + seconds, call)
        self._timers.add(timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        if timer is not None:
            self._timers.discard(timer)

    def soon(self, call: Callable[[], None]) -> None:
        """Calls it before the loop waits again."""
        self._soon.append(call)

    # --- signals

    def on_signal(self, number: int, call: Callable[[], None]) -> None:
        self._signals[number] = call
        signal.signal(number, _nothing)

    def _woken(self, _events: int) -> None:
        try:
            numbers = os.read(self._wake_in, 4096)
        except BlockingIOError:
            return
        for number in set(numbers):
            call = self._signals.get(number)
            if call is not None:
                call()

    # --- running

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        """Until `stop`."""
        poll, calls = self._epoll.poll, self._calls
        while not self._stopped:
            if self._soon:
                self._run_soon()
            for fd, events in poll(self._wait_s()):
                call = calls.get(fd)
                if call is not None:
                    try:  # as `_guard`
                        call(events | READ if events & _BROKEN else events)
                    except Exception as error:  # noqa: BLE001 - whatever it is
                        report(error)
            if self._timers and monotonic() >= self._due:
                self._run_timers()
        self._run_soon()

    def _wait_s(self) -> float:
        if self._soon:
            self._due = 0.0
            return 0
        if not self._timers:
            return -1
        self._due = min([timer.at for timer in self._timers])
        return max(0.0, self._due - monotonic())

    def _run_soon(self) -> None:
        while self._soon:
            calls, self._soon = self._soon, []
            for call in calls:
                try:  # as `_guard`
                    call()
                except Exception as error:  # noqa: BLE001 - whatever it is
                    report(error)

    def _run_timers(self) -> None:
        now = monotonic()
        for timer in sorted((timer for timer in self._timers if timer.at <= now), key=lambda timer: timer.at):
            if timer in self._timers:
                self._timers.discard(timer)
                self._guard(timer.call)

    def _guard(self, call: Callable[..., None], *arguments: int) -> None:
        """A fault of ours in one matter must not take the sandbox, and every other execution's result, with it."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is
            report(error)


def report(error: BaseException) -> None:
    """One line on stderr, which the engine or the backend keeps as the agent's log."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        place = f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    try:
        os.write(2, f"agent: {type(error).__name__} at {place}: {error}\n".encode("utf-8", "replace"))
    except OSError:
        sys.exc_info()  # nowhere left to say it


def _nothing(_number: int, _frame: object) -> None:
    """The wake-up descriptor has told the loop."""
