"""File work in the session's directory. Everything here runs in a worker: a fork of the agent as the user's uid.

Above: `spool`, `transfers`. Below: `beneath`. Names are data; links are never followed; nothing that is not a regular
file is opened, so nothing blocks.
"""

from __future__ import annotations

import binascii
import errno
import os
import stat

from . import beneath, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

OUTPUTS = ".outputs"
_UPLOADS = ".uploads"
_PIECE = 1 << 20
MAX_LISTED = 5000
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a caller asked for, or what the session's own code made of its files: no fault of the agent's.
_CALLERS = (
    errno.EACCES,
    errno.EEXIST,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTEMPTY,
    errno.EPERM,
)
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class _Refused(Exception):
    """A request that is not granted; `code` is one of wire.ERRORS."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def serve(data: str, frame: dict[str, object]) -> None:
    """Does one file request and writes its replies, frames without an id, on descriptor 1."""
    try:
        work = _OPERATIONS.get(str(frame.get("op")))
        if work is None:
            raise _Refused("bad_request", f"op is one of {', '.join(_OPERATIONS)}")
        work(data, frame)
    except _Refused as refused:
        _error(refused.code, str(refused))
    except (beneath.Outside, ValueError) as error:
        _error("bad_request", str(error))
    except OSError as error:
        reason = error.strerror or "it failed"
        if error.errno in _NO_SPACE:
            _error("too_large", f"{reason}; delete files first")
        elif error.errno in _NOT_THERE:
            _error("not_found", "no such file (links are not followed)")
        elif error.errno in _CALLERS:
            _error("bad_request", reason)
        else:
            _error("failed", reason)


# --- one function an operation


def _list(data: str, frame: dict[str, object]) -> None:
    names = beneath.parts(_text(frame, "path", empty=True), data)
    found: list[dict[str, object]] = []
    complete = True
    for path, info in _walk(data, names):
        if len(found) >= MAX_LISTED:
            complete = False
            break
        found.append({"path": show(path), "size": info.st_size, "modified": info.st_mtime, "kind": _kind(info.st_mode)})
    reply: dict[str, object] = {"t": "ok", "files": found, "complete": complete}
    while len(wire.encode(reply)) > wire.MAX_FRAME_TO_HOST - 1024:
        del found[len(found) // 2 :]
        reply["complete"] = False
    _send(reply)


def _get(data: str, frame: dict[str, object]) -> None:
    file, size = _open_file(data, beneath.parts(_text(frame, "path"), data))
    if size > _limit(frame):
        raise _Refused("too_large", f"the file has {size} bytes")
    left = size
    while left and (piece := os.read(file, min(left, wire.FILE_PIECE))):
        _data(piece)
        left -= len(piece)
    _send({"t": "ok", "size": size - left})


def _tar(data: str, frame: dict[str, object]) -> None:
    import tarfile

    names = beneath.parts(_text(frame, "path", empty=True), data)
    pieces: Any = _Pieces(_limit(frame))
    top = len("/".join([data, *names])) + 1
    with tarfile.open(fileobj=pieces, mode="w|", bufsize=wire.FILE_PIECE, format=tarfile.PAX_FORMAT) as archive:
        for path, info in _walk(data, names, hidden=True):
            member = tarfile.TarInfo(path[top:])
            member.mtime, member.mode = int(info.st_mtime), stat.S_IMODE(info.st_mode) & 0o777
            if stat.S_ISDIR(info.st_mode):
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            elif stat.S_ISREG(info.st_mode):
                _add_file(archive, member, data, beneath.parts(path, data))
    pieces.flush()
    _send({"t": "ok", "size": pieces.size})


def _add_file(archive: Any, member: Any, data: str, names: list[str]) -> None:
    try:
        file, member.size = _open_file(data, names)
    except (OSError, _Refused):  # removed or replaced meanwhile, or not readable
        return
    with os.fdopen(file, "rb") as content:
        archive.addfile(member, _Steady(content, member.size))


def _put(data: str, frame: dict[str, object]) -> None:
    names = beneath.parts(_text(frame, "path"), data)
    upload, offset, last = _text(frame, "upload"), frame.get("offset"), frame.get("last")
    if not names or names[0] == _UPLOADS:
        raise _Refused("bad_request", "path names a file")
    if len(upload) > 64 or not upload.replace("-", "").replace("_", "").isalnum() or not upload.isascii():
        raise _Refused("bad_request", "upload is an id of at most 64 letters and digits")
    if not isinstance(offset, int) or offset < 0 or not isinstance(last, bool):
        raise _Refused("bad_request", "offset is a number of bytes, and last is true or false")
    piece = binascii.a2b_base64(_text(frame, "piece", empty=True), strict_mode=True)
    aside = beneath.open_directory(data, [_UPLOADS], make=True)
    size = _append(aside, upload, offset, piece)
    if last:
        directory = beneath.open_directory(data, names[:-1], make=True)
        os.rename(upload, names[-1], src_dir_fd=aside, dst_dir_fd=directory)
        info = os.stat(names[-1], dir_fd=directory, follow_symlinks=False)
        _send({"t": "ok", "size": size, "stamp": [show("/".join([data, *names])), info.st_ctime_ns]})
        return
    _send({"t": "ok", "size": size})


def _append(aside: int, upload: str, offset: int, piece: bytes) -> int:
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if offset == 0:
        _unlink(aside, upload)
        flags |= os.O_CREAT | os.O_EXCL
    file = os.open(upload, flags, 0o644, dir_fd=aside)
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode) or info.st_size != offset:
        raise _Refused("bad_request", f"the upload has {info.st_size} bytes so far, and the piece begins at {offset}")
    os.lseek(file, offset, os.SEEK_SET)
    left = memoryview(piece)
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError:
        os.ftruncate(file, 0)
        os.unlink(upload, dir_fd=aside)
        raise
    return offset + len(piece)


def _remove(data: str, frame: dict[str, object]) -> None:
    import shutil

    names = beneath.parts(_text(frame, "path"), data)
    if not names:
        raise _Refused("bad_request", f"{data} itself stays; name something in it")
    directory = beneath.open_directory(data, names[:-1])
    if stat.S_ISDIR(os.stat(names[-1], dir_fd=directory, follow_symlinks=False).st_mode):
        shutil.rmtree(names[-1], dir_fd=directory)
    else:
        os.unlink(names[-1], dir_fd=directory)
    _send({"t": "ok"})


_OPERATIONS = {"list": _list, "get": _get, "tar": _tar, "put": _put, "remove": _remove}


# --- what they share


def _unlink(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return


def _text(frame: dict[str, object], key: str, *, empty: bool = False) -> str:
    value = frame.get(key, "" if empty else None)
    if not isinstance(value, str) or not (value or empty):
        raise _Refused("bad_request", f"{key} is a text")
    return value


def _limit(frame: dict[str, object]) -> int:
    limit = frame.get("limit")
    if not isinstance(limit, int) or limit < 0:
        raise _Refused("bad_request", "limit is a number of bytes")
    return limit


def _open_file(data: str, names: list[str]) -> tuple[int, int]:
    """A regular file, open for reading, and its size. A device or pipe is neither waited for nor read."""
    if not names:
        raise _Refused("bad_request", "path names a file")
    directory = beneath.open_directory(data, names[:-1])
    try:
        info = os.stat(names[-1], dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(info.st_mode):
            raise _Refused("not_found", f"it is a {_kind(info.st_mode)}, not a file")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(names[-1], flags, dir_fd=directory)
    finally:
        os.close(directory)
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode):
        os.close(file)
        raise _Refused("not_found", "it is not a file any more")
    return file, info.st_size


def _walk(data: str, names: list[str], *, hidden: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below `names` (or the file itself), by path. Hidden directories are named but not entered, unless
    asked for; uploads in progress are neither."""
    if names:
        above = beneath.open_directory(data, names[:-1])
        info = os.stat(names[-1], dir_fd=above, follow_symlinks=False)
        os.close(above)
        if not stat.S_ISDIR(info.st_mode):
            yield "/".join([data, *names]), info
            return
    pending = [names]
    while pending:
        at = pending.pop()
        try:
            directory = beneath.open_directory(data, at)
        except OSError:
            if at == names:
                raise
            continue
        try:
            for name in sorted(os.listdir(directory)):  # noqa: PTH208 - a descriptor, not a path
                if not at and name == _UPLOADS:
                    continue
                try:
                    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
                except OSError:
                    continue
                yield "/".join([data, *at, name]), info
                enter = hidden or not name.startswith(".")
                if stat.S_ISDIR(info.st_mode) and enter and len(at) < beneath.MAX_DEPTH:
                    pending.append([*at, name])
        finally:
            os.close(directory)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "other"


def show(path: str) -> str:
    """A path as text: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")


class _Pieces:
    """A file object that sends what is written to it. Raises _Refused beyond `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = b""
        self.size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        if self.size > self._limit:
            raise _Refused("too_large", f"it is more than {self._limit} bytes")
        self._held += data
        while len(self._held) >= wire.FILE_PIECE:
            _data(self._held[: wire.FILE_PIECE])
            self._held = self._held[wire.FILE_PIECE :]
        return len(data)

    def flush(self) -> None:
        if self._held:
            _data(self._held)
            self._held = b""


class _Steady:
    """Exactly `size` bytes of a file that may shrink while it is read: the rest is zeros."""

    def __init__(self, content: Any, size: int) -> None:
        self._content = content
        self._left = size

    def read(self, size: int) -> bytes:
        size = min(size, self._left)
        data: bytes = self._content.read(size)
        self._left -= size
        return data + bytes(size - len(data))


def _data(piece: bytes) -> None:
    _send({"t": "data", "piece": binascii.b2a_base64(piece, newline=False).decode("ascii")})


def _error(code: str, message: str) -> None:
    _send({"t": "error", "code": code, "message": message[:500]})


def _send(frame: dict[str, object]) -> None:
    left = memoryview(wire.encode(frame))
    while left:
        left = left[os.write(1, left) :]


# --- the outputs file


def save(data: str, sequence: int) -> None:
    """Writes what comes on descriptor 0 into the outputs file of `sequence`; says "saved", or why not, on 1."""
    try:
        directory = beneath.open_directory(data, [OUTPUTS], make=True)
        name = f"{sequence}.txt"
        _unlink(directory, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(name, flags, 0o644, dir_fd=directory)
        while piece := os.read(0, _PIECE):
            left = memoryview(piece)
            while left:
                left = left[os.write(target, left) :]
        os.close(target)
    except OSError as error:
        os.write(1, (error.strerror or "it failed").encode())
        return
    os.write(1, b"saved")
