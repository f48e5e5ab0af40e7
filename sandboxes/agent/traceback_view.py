"""Tracebacks for the model: its own lines, none of the engine's, bounded."""

from __future__ import annotations

import os

from . import pristine
from .pristine import BUILTINS
from .sources import Sources, load_linecache
from .text import cut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Any

globals()["__builtins__"] = BUILTINS

hidden_folders = [os.path.dirname(__file__)]  # noqa: PTH120
"""Files below these are not the model's: IPython's folder joins the engine's when it is loaded."""
# Beyond this many frames only so many at each end are formatted: a recursion a million deep would take seconds.
# (Below it, `traceback` itself collapses what repeats, and says how often.)
_DEEPEST = 5000
_FRAMES = 200


def render(error: BaseException, sources: Sources, cap: int) -> str:
    """The traceback of `error` as Python would print it, at most about `cap` characters."""
    try:
        load_linecache(sources)
        for each in _chain(error):
            each.__traceback__ = _shorten(each.__traceback__)
        view = pristine.load("traceback").TracebackException(type(error), error, error.__traceback__)
        for part in _parts(view):
            _own_lines(part, sources)
        return cut("".join(view.format()).rstrip("\n"), cap)
    except Exception as trouble:  # noqa: BLE001 - user code can damage what this uses, and the cell must be answered
        return cut(f"(no traceback: {type(trouble).__name__})\n{type(error).__name__}: {_text(error)}", cap)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - an exception's own __str__ may raise anything
        return "<no text>"


def _chain(error: BaseException) -> list[BaseException]:
    """`error` and everything it was raised from, or groups."""
    found: list[BaseException] = []
    todo: list[object] = [error]
    while todo and len(found) < 1000:
        each = todo.pop()
        if not isinstance(each, BaseException) or any(each is other for other in found):
            continue
        found.append(each)
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
    return found


def _shorten(trace: TracebackType | None) -> TracebackType | None:
    """Without the engine's frames at the outer end, and without the middle of a very deep one."""
    trace = _from_the_cell(trace)
    entries = list(_entries(trace))
    if len(entries) > _DEEPEST:
        entries[_FRAMES - 1].tb_next = entries[-_FRAMES]
    return trace


def _from_the_cell(trace: TracebackType | None) -> TracebackType | None:
    """Without what comes before the cell: the engine's frames, and the event loop's between them."""
    start = trace
    for entry in _entries(trace):
        name = entry.tb_frame.f_code.co_filename
        if name.startswith("<cell "):
            break
        if is_hidden(name):
            start = entry.tb_next
    return start


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def is_hidden(filename: str) -> bool:
    return filename.startswith(tuple(hidden_folders))


def _parts(view: Any) -> list[Any]:
    parts: list[Any] = []
    todo = [view]
    while todo:
        part = todo.pop()
        if part is not None and not any(part is other for other in parts):
            parts.append(part)
            todo += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
    return parts


def _own_lines(part: Any, sources: Sources) -> None:
    if part.stack:
        part.stack[:] = [frame for frame in part.stack if not is_hidden(frame.filename)]
    # A SyntaxError that the compiler (not the parser) found has no text: there is no file to read it from.
    name = getattr(part, "filename", None)
    if name is not None and getattr(part, "text", None) is None and part.lineno is not None:
        part.text = sources.line(name, int(part.lineno))
