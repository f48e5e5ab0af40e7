"""A session's files. All of the work is done inside the sandbox, by its agent, as the user code's uid.

Above: `manager`, `toolhost.files`. Below: `starter`, `client`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

from sandboxes import codec
from sandboxes.agent import wire
from sandboxes.client import AgentClient
from sandboxes.errors import CallRefused, SandboxError, SessionUnknown, WireError
from sandboxes.keeper import Keeper
from sandboxes.spec import SessionRequest
from sandboxes.starter import SessionOver, Starter

UPLOADS = ".uploads"  # where the agent keeps what is not complete yet


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry. `kind`: "file", "directory", "link" or "other"; `size` in bytes; `modified` in seconds."""

    path: str
    size: int
    modified: float
    kind: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries by path. Not `complete`: there are more, beyond what one answer of the agent holds."""

    files: list[FileInfo]
    complete: bool


class SessionFiles:
    """Raises SessionUnknown where nothing is open, CallRefused for what the agent refuses, and the channel's errors.

    Reading or writing starts the sandbox where it is not running.
    """

    def __init__(self, keeper: Keeper, starter: Starter, request: SessionRequest) -> None:
        self._keeper = keeper
        self._starter = starter
        self._request = request

    async def list(self, path: str = ".") -> Listing:
        async with self._working() as client:
            entries, complete = await client.list_files(path)
        try:
            return Listing([_read_info(entry) for entry in entries], complete)
        except ValueError as error:
            raise WireError(f"the agent broke the protocol: {error}") from None

    async def get(self, path: str, max_bytes: int) -> AsyncIterator[bytes]:
        """The pieces of a file. Refused when it is larger."""
        async with self._working() as client:
            async for piece in client.get_file(path, max_bytes):
                yield piece

    async def tar(self, path: str, max_bytes: int) -> AsyncIterator[bytes]:
        """An archive of a directory, in pieces."""
        async with self._working() as client:
            async for piece in client.get_file(path, max_bytes, op="tar"):
                yield piece

    async def put(self, path: str, pieces: AsyncIterable[bytes], max_bytes: int) -> int:
        """Writes a file, aside and then renamed. Makes the session where there is none. Returns its size.

        Nothing is left of an upload that ends early: too large, refused, or its pieces raise.
        """
        upload = secrets.token_hex(8)
        async with self._working(create=True) as client:
            try:
                return await _send(client, path, upload, pieces, max_bytes)
            except BaseException:
                with contextlib.suppress(SandboxError):
                    await client.remove_file(f"{UPLOADS}/{upload}")
                raise

    async def remove(self, path: str) -> None:
        async with self._working() as client:
            await client.remove_file(path)

    @contextlib.asynccontextmanager
    async def _working(self, *, create: bool = False) -> AsyncIterator[AgentClient]:
        session = await self._keeper.reach(self._request.key)
        if session is None:
            if not create:
                raise SessionUnknown("no open session of this key is known", session=str(self._request.key))
            session = await self._keeper.open(self._request)
        session.touch(self._keeper.clock.now())
        with session.until_closed():
            sandbox = session.sandbox
            if sandbox is None or not sandbox.connected:
                async with session.turn:
                    try:
                        sandbox = await self._starter.ensure(session, lambda position: None)
                    except SessionOver:
                        raise SessionUnknown("the session was closed meanwhile", session=str(session.key)) from None
            yield await sandbox.client()


async def _send(client: AgentClient, path: str, upload: str, pieces: AsyncIterable[bytes], max_bytes: int) -> int:
    size, waiting = 0, b""
    async for piece in pieces:
        waiting += piece
        while len(waiting) > wire.FILE_PIECE:
            size = await client.put_file(path, upload, size, waiting[: wire.FILE_PIECE], last=False)
            waiting = waiting[wire.FILE_PIECE :]
        if size + len(waiting) > max_bytes:
            raise CallRefused(f"the file is larger than {max_bytes} bytes")
    return await client.put_file(path, upload, size, waiting, last=True)


def _read_info(fields: codec.Fields) -> FileInfo:
    kind = codec.name(fields, "kind")
    if kind not in ("file", "directory", "link", "other"):
        raise ValueError("kind: not one of the known values")
    return FileInfo(codec.name(fields, "path"), codec.count(fields, "size"), codec.number(fields, "modified"), kind)
