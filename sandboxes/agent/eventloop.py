"""The event loop that cells with a top-level `await` run in.

One loop lives as long as the interpreter, so tasks survive their cell; between cells it runs only while it has tasks.
It is not running during other cells, so that `asyncio.run()` works in them.
"""

from __future__ import annotations

import select

from . import pristine
from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task
    from collections.abc import Coroutine
    from types import FrameType
    from typing import Any

    from .channel import Channel
    from .interrupts import Interrupts

globals()["__builtins__"] = BUILTINS

# Values fixed by CPython: inspect.CO_COROUTINE, CO_ITERABLE_COROUTINE and CO_ASYNC_GENERATOR.
_ANY_COROUTINE = 0x80 | 0x100 | 0x200


class EventLoop:
    """Runs coroutines to their end, and leftover tasks while nothing else is to be done."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._loop: AbstractEventLoop | None = None
        self._task: Task[Any] | None = None
        self._cancelled = False

    def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """What `coroutine` returns. Raises what it raises, KeyboardInterrupt when it was interrupted."""
        asyncio = pristine.load("asyncio")
        loop = self._usable(asyncio)
        asyncio.set_event_loop(loop)
        self._cancelled = False
        self._task = loop.create_task(coroutine)
        self._interrupts.cancel = self._cancel
        try:
            with self._interrupts:
                return loop.run_until_complete(self._task)
        except asyncio.CancelledError as error:
            if not self._cancelled:
                raise
            raise KeyboardInterrupt().with_traceback(error.__traceback__) from None
        finally:
            self._interrupts.cancel = None
            if not self._task.done():
                self._task.cancel()
            self._task = None

    def _usable(self, asyncio: Any) -> AbstractEventLoop:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        return self._loop

    def _cancel(self, frame: FrameType | None) -> bool:
        """Cancels the waiting cell. False while a task runs, or if cancelled before: KeyboardInterrupt then."""
        if self._loop is None or self._task is None or self._cancelled or self._working(frame) is not None:
            return False
        if not self._task.cancel():
            return True  # it has ended
        self._cancelled = self._interrupts.landed = True
        self._loop.call_soon_threadsafe(lambda: None)  # wakes the selector: a signal alone does not
        return True

    def _working(self, frame: FrameType | None) -> Task[Any] | None:
        """The task whose code `frame` is in. A task that has just waited is still the current one while asyncio notes
        down what for: an exception raised there would lose it, and say nothing of where it waited."""
        task: Task[Any] | None = pristine.load("asyncio").current_task(self._loop)
        while task is not None and frame is not None:
            if frame.f_code.co_flags & _ANY_COROUTINE:
                return task
            frame = frame.f_back
        return None

    def has_tasks(self) -> bool:
        """Whether earlier cells left tasks that have not ended."""
        if self._loop is None or self._loop.is_closed():
            return False
        return bool(pristine.load("asyncio").all_tasks(self._loop))

    def run_until_readable(self, channel: Channel) -> None:
        """Lets the tasks go on until the supervisor has sent something."""
        loop = self._loop
        if loop is None:
            return
        asyncio = pristine.load("asyncio")
        loop.add_reader(channel.fd, loop.stop)
        wake = loop.create_task(_ended(asyncio))
        poll = select.poll()
        poll.register(channel.fd, select.POLLIN)
        # An interrupt now is meant for the cell that waits, and that only a task at work can keep waiting.
        self._interrupts.idle = lambda frame: self._working(frame) not in (None, wake) and bool(poll.poll(0))
        try:
            loop.run_forever()
        finally:
            self._interrupts.idle = None
            wake.cancel()
            loop.remove_reader(channel.fd)


async def _ended(asyncio: Any) -> None:
    """Stops the loop once no other task is left: an idle interpreter costs nothing."""
    me = asyncio.current_task()
    while others := asyncio.all_tasks() - {me}:
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()
