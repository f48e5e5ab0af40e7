"""A Python interpreter of a fake sandbox: code runs in this process, statement by statement.

Enough for tests of what is above a backend: variables, output, the value of the last expression, tracebacks, top-level
`await`, endless loops and sleeps that can be interrupted, `os._exit`, `os.kill` of itself, files below `/mnt/data`.
It isolates nothing and is never used outside of tests.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import io
import posixpath
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace

DATA = "/mnt/data"


class Died(BaseException):
    """The interpreter ended: by a signal, or with an exit code."""

    def __init__(self, *, signal: int | None = None, exit_code: int | None = None) -> None:
        self.signal = signal
        self.exit_code = exit_code


class _Sleep(BaseException):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class FakePython:
    """One incarnation of an interpreter."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.ignores_interrupts = False
        self._files = files
        self._write: Callable[[str], None] = lambda text: None
        self._names: dict[str, object] = {"__name__": "__main__", "__builtins__": self._builtins()}

    async def run(self, code: str, write: Callable[[str], None]) -> tuple[str | None, str | None]:
        """The value's text and the traceback's. Raises Died. Cancelling it is an interrupt."""
        self._write = write
        try:
            body = ast.parse(code).body
        except SyntaxError as error:
            return None, "".join(traceback.format_exception_only(error))
        value: object = None
        try:
            for index, node in enumerate(body):
                value = await self._statement(node, last=index == len(body) - 1)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever user code raises is its result
            return None, "Traceback (most recent call last):\n" + "".join(traceback.format_exception_only(error))
        if value is not None:
            self._names["_"] = value
        return None if value is None else repr(value), None

    async def _statement(self, node: ast.stmt, *, last: bool) -> object:
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and isinstance(node.body[0], ast.Pass):
            await asyncio.Event().wait()
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        try:
            if last and isinstance(node, ast.Expr):
                found = eval(compile(ast.Expression(node.value), "<cell>", "eval", flags), self._names)
            else:
                found = eval(compile(ast.Module([node], []), "<cell>", "exec", flags), self._names)
            return await found if inspect.iscoroutine(found) else found
        except _Sleep as sleep:
            await asyncio.sleep(sleep.seconds)
            return None
        except SystemExit as error:
            raise Died(exit_code=error.code if isinstance(error.code, int) else 0) from None

    def _builtins(self) -> dict[str, object]:
        found = dict(vars(builtins))
        found["print"] = self._print
        found["open"] = self._open
        found["__import__"] = self._import
        found["input"] = self._input
        return found

    def _print(self, *values: object, sep: str = " ", end: str = "\n", **_: object) -> None:
        self._write(sep.join(map(str, values)) + end)

    def _input(self, prompt: str = "") -> str:
        self._write(prompt)
        raise EOFError("there is no input")

    def _import(self, name: str, *rest: object) -> object:
        fakes: Mapping[str, object] = {"time": self._time(), "os": self._os(), "signal": self._signal()}
        return fakes[name] if name in fakes else __import__(name, *rest)  # type: ignore[arg-type]  # passed through

    def _time(self) -> object:
        def sleep(seconds: float) -> None:
            raise _Sleep(seconds)

        return SimpleNamespace(sleep=sleep)

    def _os(self) -> object:
        def leave(code: int) -> None:
            raise Died(exit_code=code)

        def kill(pid: int, signal: int) -> None:
            raise Died(signal=signal)

        def fsync(fd: int) -> None:
            """What is flushed is kept."""

        return SimpleNamespace(_exit=leave, kill=kill, getpid=lambda: 2, abort=lambda: kill(2, 6), fsync=fsync)

    def _signal(self) -> object:
        def handle(number: int, handler: object) -> None:
            self.ignores_interrupts = self.ignores_interrupts or (number == 2 and handler == 1)

        return SimpleNamespace(signal=handle, SIGINT=2, SIGKILL=9, SIG_IGN=1)

    def _open(self, path: str, mode: str = "r") -> io.StringIO:
        files, name = self._files, posixpath.relpath(posixpath.join(DATA, path), DATA)
        if "w" not in mode:
            if name not in files:
                raise FileNotFoundError(2, "No such file or directory", path)
            return io.StringIO(files[name].decode())

        class Writing(io.StringIO):
            def fileno(self) -> int:
                return 3

            def flush(self) -> None:
                files[name] = self.getvalue().encode()

            def close(self) -> None:
                if not self.closed:
                    self.flush()
                super().close()

        return Writing()
