"""A byte stream to an agent that listens on a unix socket in a directory of the host.

Above: the backends whose sandboxes are on this machine. Below: asyncio and the kernel.

The directory may be written to from inside a sandbox (docker mounts it there), so what lies in it is hostile: the
socket is opened by the directory's descriptor without following a link, and is connected to by that descriptor, so
that what was checked is what is connected to.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

from sandboxes.agent.wire import MAX_FRAME_TO_HOST
from sandboxes.backends.base import PromptReader, StreamChannel
from sandboxes.errors import EngineUnavailable, StateLost

# A full backlog is the one reason for which connecting to a unix socket does not end at once.
BUSY_PAUSE_S = 0.02


async def connect(directory: Path, name: str, nonce: str, *, timeout_s: float) -> StreamChannel:
    """Connects to the socket `name` in `directory`.

    Raises StateLost when there is no socket, something else, or nobody listening; EngineUnavailable when the one who
    listens accepts nobody within `timeout_s` seconds.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            connection = connected(directory, name)
        except BlockingIOError:
            if asyncio.get_running_loop().time() >= deadline:
                raise EngineUnavailable("the sandbox's agent accepts no connection") from None
            await asyncio.sleep(BUSY_PAUSE_S)
            continue
        except OSError as error:
            raise StateLost(f"the sandbox's agent cannot be reached: {error.strerror}") from None
        try:
            reader, writer = await streams(connection)
        except BaseException:
            connection.close()
            raise
        return StreamChannel(reader, writer, nonce)


async def streams(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As `asyncio.open_unix_connection`, with a reader that can hand on at once."""
    loop = asyncio.get_running_loop()
    reader = PromptReader(limit=MAX_FRAME_TO_HOST, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_unix_connection(lambda: protocol, sock=connection)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def connected(directory: Path, name: str) -> socket.socket:
    """A connected, non-blocking socket. Raises OSError; BlockingIOError when the backlog is full."""
    holder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        target = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=holder)
    finally:
        os.close(holder)
    try:
        if not stat.S_ISSOCK(os.fstat(target).st_mode):
            raise OSError(0, "it is not a socket")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            # Through the descriptor: no path is walked again, and the length of the real path does not matter.
            connection.connect(f"/proc/self/fd/{target}")
        except BaseException:
            connection.close()
            raise
        return connection
    finally:
        os.close(target)


def listening(directory: Path, name: str, backlog: int = 64) -> socket.socket:
    """A listening socket bound as `name` in `directory`, for any length of path. Raises OSError."""
    holder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"/proc/self/fd/{holder}/{name}")
            listener.listen(backlog)
        except BaseException:
            listener.close()
            raise
        return listener
    finally:
        os.close(holder)
