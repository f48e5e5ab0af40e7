"""The process that holds the variables: reads cells from the channel, runs them, answers each.

Above it: the supervisor, which starts it (see `launch`), reads its output pipe, and believes what it reports only
about its own cell's text. Frames in: {"t": "cell", "n", "code", "cap", "outputs"}. Frames out: {"t": "ready"} once and
{"t": "done", "n", "outcome", "value", "error", "images", "note", "untouched"} for each cell; `untouched`: no interrupt
has reached it, so it ended by itself. Exit status 70: the channel was lost.
"""

from __future__ import annotations

import builtins
import select
import sys

from . import figures, pristine
from .cell import Cell, filename, is_coroutine, looks_like_magic
from .channel import Channel, ChannelClosed
from .eventloop import EventLoop
from .images import Images
from .interrupts import Interrupts
from .look import Look
from .pristine import BUILTINS
from .rich import better_text, bundle_text, save_data, save_images
from .sources import AfterImport, Sources
from .streams import Streams
from .text import clean, cut, show
from .traceback_view import hidden_folders, render
from .world import World

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from types import ModuleType
    from typing import Any

    from .ipython import Shell
else:
    from .pristine import OS as os

globals()["__builtins__"] = BUILTINS

EXIT_CHANNEL_LOST = 70
# How soon to look again for killed children that are not gone yet, in milliseconds.
_REAP_AGAIN = 20
# Characters shown of an error that no cell caused: a signal handler's or a background task's.
_BACKGROUND_CAP = 2000


_NO_IPYTHON = (
    "IPython is not installed in this sandbox, so magics (%...), shell lines (!...), help (obj?) and display() do not "
    "work here. Nothing of this cell was run; all variables are as they were. Use plain Python: subprocess.run() for "
    "commands, help() for help, print() or a last expression to show a value."
)
# These have nothing to show but their repr.
_PLAIN = frozenset({int, float, bool, complex, str, bytes, list, tuple, dict, set, frozenset})


class IPythonMissing(Exception):
    """A cell needs IPython, and this environment does not have it."""


class Interpreter:
    """One namespace and the loop that serves it."""

    def __init__(self, channel: Channel, home: str) -> None:
        self._pid = os.getpid()
        self._channel = channel
        self._streams = Streams()
        self._interrupts = Interrupts()
        self._world = World(self._streams, home)
        self._loop = EventLoop(self._interrupts)
        self._sources = Sources()
        self._futures = 0
        self._images = Images(0, "")
        self._shell: Shell | None = None
        self._look = Look(home)
        self._unreaped: list[int] = []
        self._poll = select.poll()
        self._poll.register(channel.fd, select.POLLIN)
        hooks = {"linecache": self._sources.fill, "matplotlib.pyplot": self._hook_pyplot}
        sys.meta_path.insert(0, AfterImport(hooks))  # type: ignore[arg-type]
        pristine.MODULES.update(sys.modules)
        os.register_at_fork(before=self._streams.flush, after_in_child=self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: the channel and kept output are the parent's."""
        self._channel.close()
        self._streams.forget()

    def serve(self) -> None:
        """Answers cells until the channel closes. Raises ChannelClosed."""
        version = ".".join([str(part) for part in sys.version_info[:3]])
        self._channel.send({"t": "ready", "pid": self._pid, "python": version})
        while True:
            request = self._next()
            kind = request.get("t")
            if kind == "cell":
                if self._unreaped:
                    self._reap()
                self._channel.send(self._answer(request))
            elif kind == "reap":
                self._unreaped = [*self._unreaped, *request["pids"]]
                self._reap()

    def _reap(self) -> None:
        """Children that the supervisor ended: as zombies they would count against the process limit. One that was
        killed takes a moment to be one."""
        left = []
        for pid in self._unreaped:
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    left.append(pid)
            except OSError:
                continue  # not a child of this process, or user code has waited for it
        self._unreaped = left

    def _next(self) -> dict[str, Any]:
        while not self._channel.has_line():
            try:
                self._wait()
                self._channel.read()
            except ChannelClosed:
                raise
            except BaseException as error:  # noqa: BLE001 - of a signal handler or task of the user's
                if os.getpid() != self._pid:
                    os._exit(1)
                self._world.disturbed()
                self._streams.report(render(error, self._sources, _BACKGROUND_CAP))
        return self._channel.take()

    def _wait(self) -> None:
        """Returns when there is something to read; meanwhile tasks of earlier cells go on."""
        if self._loop.has_tasks():
            self._world.disturbed()
            try:
                self._loop.run_until_readable(self._channel)
            finally:
                self._streams.flush()
        again = _REAP_AGAIN
        while self._unreaped and not self._poll.poll(again):
            self._reap()
            again = min(2 * again, 1000)
        self._poll.poll()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The frame for one cell, whatever happens to the engine itself: an interrupt in the wrong microsecond, say."""
        try:
            return self.run(request)
        except BaseException as error:  # noqa: BLE001 - every cell gets an answer
            if os.getpid() != self._pid:
                os._exit(1)
            self._interrupts.armed = False
            run = _Run(request)
            run.outcome = "interrupted" if issubclass(type(error), KeyboardInterrupt) else "raised"
            run.error = render(error, self._sources, run.cap)
            run.add_note("The result of this cell could not be completed.")
            return run.frame()

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Runs one cell and returns the frame that answers it."""
        run = _Run(request)
        self._images = run.images
        run.add_note(self._world.prepare())
        self._interrupts.install()
        self._interrupts.landed = False
        try:
            self._execute(run)
        except BaseException as error:  # noqa: BLE001 - whatever a cell raises has one defined result
            self._interrupts.armed = False
            self._world.stop_tracing()
            self._end(run, error)
        if os.getpid() != self._pid:
            self._quit_child(run)
        run.untouched = self._interrupts.untouched
        self._finish(run)
        return run.frame()

    def _execute(self, run: _Run) -> None:
        name = filename(run.number)
        self._sources.add(name, run.code)
        cell = self._read(run.code, name)
        self._futures = cell.futures
        if cell.needs_loop:
            try:
                value = self._loop.run(_in_loop(cell, self._world.namespace))
            finally:
                self._world.stop_tracing()
        else:
            value = self._in_thread(cell)
        if self._shell is not None and self._shell.failure is not None:
            failure, self._shell.failure = self._shell.failure, None
            raise failure
        if value is not None and os.getpid() == self._pid:
            self._show(run, value)

    def _read(self, code: str, name: str) -> Cell:
        """The cell, through IPython where it is needed. Raises SyntaxError, IPythonMissing."""
        try:
            cell = Cell(code, name, self._futures)
        except SyntaxError as error:
            if not looks_like_magic(code, error.lineno):
                raise
        else:
            if self._shell is None and self._wants_ipython(cell):
                self._load_ipython()
            return cell
        shell = self._load_ipython()
        python = shell.transform_cell(code)
        if python.count("\n") != code.rstrip("\n").count("\n") + 1:
            self._sources.add(name, python)  # else the lines of tracebacks stay as they were typed
        return Cell(python, name, self._futures)

    def _wants_ipython(self, cell: Cell) -> bool:
        source = cell.source
        if "IPython" not in source and "display" not in source and "get_ipython" not in source:
            return False
        if cell.imports("IPython"):
            return True
        return any(cell.uses(name) and name not in self._world.namespace for name in ("display", "get_ipython"))

    def _load_ipython(self) -> Shell:
        if self._shell is None:
            path, sys.path = sys.path, [entry for entry in self._world.path if entry]
            try:
                from . import ipython
            except ImportError as error:
                raise IPythonMissing(_NO_IPYTHON) from error
            finally:
                sys.path = path
            hidden_folders.append(ipython.FOLDER)
            self._shell = ipython.start(self._world.main, self._display)
        return self._shell

    def _display(self, bundle: dict[str, Any]) -> None:
        """What `display()` does with a MIME bundle."""
        if not save_data(bundle, self._images):
            sys.stdout.write(bundle_text(bundle) + "\n")

    def _hook_pyplot(self, pyplot: ModuleType) -> None:
        figures.show_inline(pyplot, lambda: self._images)

    def _in_thread(self, cell: Cell) -> object:
        if cell.statements is not None:
            self._world.call(cell.statements, self._interrupts)
        if cell.expression is None:
            return None
        return self._world.call(cell.expression, self._interrupts)

    def _show(self, run: _Run, value: object) -> None:
        vars(builtins)["_"] = value
        with self._interrupts:
            if sys.displayhook is not sys.__displayhook__ and callable(sys.displayhook):
                sys.displayhook(value)
            else:
                self._show_rich(run, value)

    def _show_rich(self, run: _Run, value: object) -> None:
        if type(value) in _PLAIN:
            run.value = show(value, run.cap)
            return
        if self._shell is not None and getattr(type(value), "_ipython_display_", None) is not None:
            value._ipython_display_()  # type: ignore[attr-defined]
            return
        try:
            save_images(value, run.images)
        except Exception as error:  # noqa: BLE001 - its own methods failed; its text is still worth showing
            run.images.skip(f"the object's own method raised {type(error).__name__}")
        run.value = clean(better_text(value, show(value, run.cap)))

    def _end(self, run: _Run, error: BaseException) -> None:
        """Turns an exception that left the cell into the cell's result."""
        kind = type(error)  # not isinstance(): that asks the object, which may raise in turn
        if issubclass(kind, SystemExit):
            run.outcome = "exited"
            run.exit_status = getattr(error, "code", None)
            return
        if issubclass(kind, KeyboardInterrupt) and run.value is not None:
            self._interrupts.landed = False  # its value was there: it had ended
            return
        run.outcome = "interrupted" if issubclass(kind, KeyboardInterrupt) else "raised"
        if kind is IPythonMissing:
            run.error = str(error)
            return
        try:
            with self._interrupts:
                run.error = render(error, self._sources, run.cap)
                sys.last_type, sys.last_value, sys.last_traceback = kind, error, error.__traceback__
        except BaseException as trouble:  # noqa: BLE001 - an interrupt, or an attribute of the exception that raises
            run.error = run.error or f"(no traceback: {type(trouble).__name__})\n{kind.__name__}"

    def _quit_child(self, run: _Run) -> None:
        """A child that user code forked and that fell out of the cell ends here: what it raised is all it shows."""
        status = run.exit_status
        if not isinstance(status, int):
            status = 0 if run.outcome == "ok" or (status is None and run.outcome == "exited") else 1
        self._streams.flush()
        if run.error is not None and run.outcome == "raised":
            try:  # noqa: SIM105 - contextlib is not imported here
                os.write(2, run.error.encode("utf-8", "backslashreplace") + b"\n")
            except OSError:  # it has closed its stderr
                pass
        os._exit(status & 0xFF)

    def _finish(self, run: _Run) -> None:
        if run.outcome == "exited":
            run.add_note(_exit_note(run.exit_status))
        try:
            with self._interrupts:
                self._flush_all()
                figures.save_open(run.images)
        except KeyboardInterrupt:
            run.add_note("An interrupt came while its output and figures were being written: some may be missing.")
        except BaseException:  # noqa: BLE001, S110 - a stream of the user's own; ours are flushed below
            pass
        run.add_note(run.images.note())
        run.add_note(self._world.repair())
        self._streams.flush()
        if run.since is not None:
            try:  # noqa: SIM105 - contextlib is not imported here
                run.files = self._look.since(run.since)
            except BaseException:  # noqa: BLE001, S110 - no descriptor, no memory, an audit hook
                pass

    def _flush_all(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        if "ctypes" in sys.modules:  # C code that was called may have left text in libc's buffers
            sys.modules["ctypes"].CDLL(None).fflush(None)


async def _in_loop(cell: Cell, namespace: dict[str, Any]) -> object:
    value = None
    for code in (cell.statements, cell.expression):
        if code is not None:
            value = eval(code, namespace)
            if is_coroutine(code):
                value = await value
    return value if cell.expression is not None else None


def _exit_note(status: object) -> str:
    try:
        shown = "" if status is None else cut(str(status), 200)
    except BaseException:  # noqa: BLE001 - the status may be any object
        shown = type(status).__name__
    return f"The code ended itself with sys.exit({shown}). The interpreter goes on; variables are kept."


class _Run:
    """A cell's request, and its result so far."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.number = int(request["n"])
        self.code = str(request["code"]).removeprefix("\ufeff")
        self.cap = int(request["cap"])
        self.outputs = str(request["outputs"])
        self.outcome = "ok"
        self.untouched = False
        self.value: str | None = None
        self.error: str | None = None
        self.images = Images(self.number, self.outputs)
        self.exit_status: object = None
        self.since: int | None = request.get("since")
        self.files: list[dict[str, object]] | None = None
        self._notes: list[str] = []

    def add_note(self, note: str | None) -> None:
        if note:
            self._notes.append(note)

    def frame(self) -> dict[str, Any]:
        return {
            "t": "done",
            "n": self.number,
            "outcome": self.outcome,
            "value": self.value,
            "error": self.error,
            "images": self.images.saved,
            "note": cut(" ".join(self._notes), self.cap) if self._notes else None,
            "untouched": self.untouched,
            "files": self.files,
        }


def _set_defaults(site: str) -> None:
    """What programs that user code starts shall know too: there is no screen, and where packages can be installed."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    os.environ.setdefault("PIP_TARGET", site)
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")


def _import(modules: list[str], not_from: tuple[str, str]) -> None:
    """Imports what the operator chose, and no file of user code's that has such a name: it could keep every later
    interpreter of the session from starting."""
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if entry and entry not in not_from]
    for name in modules:
        try:
            __import__(name)
        except Exception as error:  # noqa: BLE001 - a module of the operator's list may raise anything
            print(f"{name} cannot be imported at start: {error}", file=sys.stderr)
    sys.path[:] = path


def main(fd: int, home: str, site: str, modules: list[str]) -> None:
    """The process: never returns. `fd` is the channel, `home` the working directory, `modules` are imported first."""
    channel = Channel(fd)
    os.chdir(home)
    sys.argv = [""]
    _set_defaults(site)
    sys.path[:] = ["", *[entry for entry in sys.path if entry], site]
    status = 0
    try:
        interpreter = Interpreter(channel, home)
        _import(modules, (home, site))
        interpreter.serve()
    except ChannelClosed:
        status = EXIT_CHANNEL_LOST
    os._exit(status)
