"""stdout and stderr of user code: unbuffered, in order, and put back after whatever a cell did to them.

Descriptors 1 and 2 are one pipe. Nothing is held back, so that output of subprocesses and C code lands where it
belongs and a cell that hangs has shown what it printed; only while there are several threads does each keep its
unfinished line, else their lines would be torn at every `print`.
"""

from __future__ import annotations

import _thread
import io
import sys
from fcntl import F_GETFD
from fcntl import fcntl as control

from .channel import PIPE_MARK, mark, marked, raise_fd
from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Any
else:
    from .pristine import OS as os

globals()["__builtins__"] = BUILTINS

_HELD_CHARACTERS = 4096


class _Pipe(io.FileIO):
    """A descriptor that takes every byte: a signal can cut a write short, and the text layer would not notice."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        while view:
            written = io.FileIO.write(self, view)
            if written is None:  # a child that shares the pipe made it non-blocking
                os.set_blocking(self.fileno(), True)
                continue
            if written == len(view):
                break
            view = view[written:]
        return total


class Stream(io.TextIOWrapper):
    """A text stream over descriptor `fd` that writes through. Closing it leaves the descriptor open."""

    def __init__(self, fd: int) -> None:
        raw = _Pipe(fd, "w", closefd=False)
        io.TextIOWrapper.__init__(
            self, raw, encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True
        )
        vars(self)["mode"] = "w"
        self._held: dict[int, str] = {}

    def write(self, text: str) -> int:
        if not self._held and not _thread._count():
            return io.TextIOWrapper.write(self, text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        mine = _thread.get_ident()
        pending = self._held.pop(mine, "") + text
        whole = len(pending) if len(pending) > _HELD_CHARACTERS else pending.rfind("\n") + 1
        if whole < len(pending):
            self._held[mine] = pending[whole:]
        if whole:
            io.TextIOWrapper.write(self, pending[:whole])
        return len(text)

    def flush(self) -> None:
        if self._held:
            pending = self._held.pop(_thread.get_ident(), "")
            if pending:
                io.TextIOWrapper.write(self, pending)
        io.TextIOWrapper.flush(self)

    def drain(self) -> None:
        """Writes what any thread has kept."""
        while self._held:
            io.TextIOWrapper.write(self, self._held.popitem()[1])

    def forget(self) -> None:
        """Drops what is kept: in a forked child it is the parent's to write."""
        self._held.clear()


def _is_open(fd: int) -> bool:
    try:
        control(fd, F_GETFD)
    except OSError:
        return False
    return True


def _usable(stream: Any) -> bool:
    try:
        return stream is not None and not stream.closed
    except ValueError:  # detached
        return False


class Streams:
    """The three standard streams and their descriptors, with a spare of the pipe to put them back from."""

    def __init__(self) -> None:
        self._spare = raise_fd(os.dup(1))
        self._pipe = self._identity(self._spare)
        mark(self._spare, PIPE_MARK)
        self.restore()

    @staticmethod
    def _identity(fd: int) -> tuple[int, int] | None:
        try:
            stat = os.fstat(fd)
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    def restore(self) -> bool:
        """Makes descriptors 0 to 2 and `sys.stdin/out/err` what they were at the start. True if any had changed."""
        changed = self._restore_descriptors()
        return self.restore_objects() or changed

    def _restore_descriptors(self) -> bool:
        changed = False
        for fd in (1, 2):
            if not marked(fd, PIPE_MARK) and self._identity(fd) != self._pipe:
                os.dup2(self._spare, fd)
                changed = True
        if not _is_open(0):
            null = os.open("/dev/null", os.O_RDONLY)
            if null != 0:
                os.dup2(null, 0)
                os.close(null)
            changed = True
        return changed

    def restore_objects(self) -> bool:
        """As `restore`, of the objects alone."""
        try:
            out, err, given = self.stdout, self.stderr, self.stdin
            if sys.stdout is out and sys.stderr is err and not (out.closed or err.closed or given.closed):
                sys.stdin = given
                return False
        except (AttributeError, ValueError):  # not made yet; taken away; detached
            pass
        changed = False
        for name, fd in (("stdout", 1), ("stderr", 2)):
            ours = getattr(self, name, None)
            if not _usable(ours):
                ours = Stream(fd)
                setattr(self, name, ours)
                setattr(sys, f"__{name}__", ours)
            if getattr(sys, name, None) is not ours:
                setattr(sys, name, ours)
                changed = True
        stdin = getattr(self, "stdin", None)
        if not _usable(stdin):
            self.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, "__stdin__", self.stdin)  # noqa: B010 - typed as final
        sys.stdin = self.stdin
        return changed

    def flush(self) -> None:
        """Delivers everything written so far, also to streams that a cell put in place of ours."""
        for stream in (self.stdout, self.stderr):
            try:
                if stream._held:
                    stream.drain()
            except (OSError, ValueError):  # closed by the cell: nothing is kept then
                continue

    def report(self, text: str) -> None:
        """Writes a line of the engine's own to the pipe, whatever has become of `sys.stderr`."""
        self.flush()
        os.write(self._spare, text.encode("utf-8", "backslashreplace") + b"\n")

    def forget(self) -> None:
        """In a forked child: what is kept, and the spare, are the parent's."""
        self.stdout.forget()
        self.stderr.forget()
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    stdout: Stream
    stderr: Stream
    stdin: Any
