"""Frames over the engine's attach stream, for where a unix socket cannot work: a remote engine, a runtime whose kernel
keeps sockets to itself (gVisor), a host that is not root.

Above: `docker`. Below: asyncio, and the engine's framing of a container's output (API reference, "Attach to a
container", stream format): type (1 byte: 1 stdout, 2 stderr), 3 bytes of zero, length (4 bytes, big-endian), payload.

What the agent writes while nobody is attached is lost by the engine, and a new attachment may begin with the rest of a
frame, or with frames that were meant for the host before. The agent ends half a frame with an empty line when a new
host says hello; everything before its own hello is dropped here, and results are asked for again. Every attachment
reads the same stream, so a host whose place another took reads the answer to the other's hello: its channel ends there,
as one that was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from sandboxes.agent import wire
from sandboxes.agent.wire import MAX_FRAME_TO_HOST
from sandboxes.backends.base import Channel

STDOUT = 1
HEADER_BYTES = 8
PIECE_BYTES = 64 << 10
REFUSALS = ("refused", "bad_version", "bad_frame")


class AttachChannel(Channel):
    """One attachment to PID 1's stdin and stdout."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        nonce: str,
        pump: asyncio.Task[None],
        ends: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.nonce = nonce
        self._pump = pump
        self._ends = ends

    async def close(self) -> None:
        self._pump.cancel()
        for writer in (self.writer, *self._ends):
            writer.close()
        await asyncio.wait([self._pump])
        for writer in (self.writer, *self._ends):
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def attached(stream: socket.socket, nonce: str) -> AttachChannel:
    """A channel over an attachment, which it owns from here on, also when it raises."""
    with contextlib.ExitStack() as undo:  # a writer before its socket: the loop must not watch a closed one
        undo.callback(stream.close)
        from_engine, writer = await asyncio.open_connection(sock=stream)
        undo.callback(writer.close)
        # The kernel's buffers between the two ends hold the engine back when the host reads slowly.
        outer, inner = socket.socketpair()
        undo.callback(outer.close)
        undo.callback(inner.close)
        reader, outer_writer = await asyncio.open_connection(sock=outer, limit=MAX_FRAME_TO_HOST)
        undo.callback(outer_writer.close)
        _, inner_writer = await asyncio.open_connection(sock=inner)
        undo.pop_all()
    pump = asyncio.create_task(_pump(from_engine, inner_writer), name="docker attach")
    pump.add_done_callback(lambda _: inner_writer.close())
    return AttachChannel(reader, writer, nonce, pump, (outer_writer, inner_writer))


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Until either end is gone, or another host took this one's place. What is not stdout (a line that the agent says
    to people) is dropped."""
    conversation = Conversation()
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            header = await source.readexactly(HEADER_BYTES)
            left = int.from_bytes(header[4:], "big")
            while left:
                piece = await source.read(min(left, PIECE_BYTES))
                if not piece:
                    return
                left -= len(piece)
                if header[0] == STDOUT and (wanted := conversation.feed(piece)):
                    sink.write(wanted)
                    await sink.drain()
                if conversation.over:
                    return


class Conversation:
    """What of an attachment is for this host: from the agent's answer to its hello to the answer to another's."""

    def __init__(self) -> None:
        self.over = False
        self._begun = False
        self._line = bytearray()  # the one that has not ended, up to what makes it too long
        self._held = False  # back: the end of a line that may be half a frame, and everything behind it

    def feed(self, piece: bytes) -> bytes:
        """What of it is for this host; nothing once `over`."""
        wanted = bytearray()
        *ended, rest = piece.split(b"\n")
        for part in ended:
            wanted += self._end_of_line(part)
            if self.over:
                return bytes(wanted)
        return bytes(wanted + self._part_of_line(rest))

    def _part_of_line(self, part: bytes) -> bytes:
        self._line += part[: max(0, MAX_FRAME_TO_HOST + 1 - len(self._line))]
        if not self._begun:
            return b""
        if not self._held:
            return part
        if len(self._line) <= MAX_FRAME_TO_HOST:
            return b""
        self._held = False  # no hello is so long
        return b"\n" + bytes(self._line)

    def _end_of_line(self, part: bytes) -> bytes:
        part = self._part_of_line(part)
        line = bytes(self._line)
        self._line.clear()
        frame = _frame(line)
        answers = frame is not None and _answers(frame)
        if not self._begun:
            self._begun = answers
            return line + b"\n" if answers else b""
        if answers:
            self.over = True
            return b""
        if self._held:
            part = b"\n" + line
        self._held = frame is None and line != b""
        return part if self._held else part + b"\n"


def _frame(line: bytes) -> dict[str, object] | None:
    try:
        return wire.decode(line, wire.REPLIES)
    except wire.FrameError:
        return None


def _answers(frame: dict[str, object]) -> bool:
    """Whether it answers a hello: no other request has its id."""
    refused = frame["t"] == "error" and frame.get("code") in REFUSALS
    return frame["t"] == "hello" or (refused and frame.get("id") == 0)
