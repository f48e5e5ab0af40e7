"""Frames over the engine's attach stream: nothing of an earlier conversation reaches a new host, nothing is lost."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.agent import wire
from sandboxes.backends.docker_channel import Conversation, attached

HELLO = wire.encode({"t": "hello", "id": 0, "v": 1})
RESULT = wire.encode({"t": "result", "id": 7})


def engine_frame(kind: int, payload: bytes) -> bytes:
    return bytes([kind, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


@given(st.lists(st.integers(0, 10_000), max_size=20), st.integers(0, len(RESULT)))
def test_what_was_meant_for_an_earlier_host_is_dropped_however_the_stream_is_cut(cuts: list[int], half: int) -> None:
    stream = RESULT[half:] + RESULT + b'{"t":"resu' + b"\n" + HELLO + RESULT + b"rest"
    conversation = Conversation()
    assert b"".join(conversation.feed(piece) for piece in split(stream, cuts)) == HELLO + RESULT + b"rest"


@given(st.lists(st.integers(0, 10_000), max_size=20), st.integers(0, len(RESULT) - 2))  # without its last "}" at most
def test_another_host_that_takes_over_ends_the_stream_before_any_broken_line(cuts: list[int], half: int) -> None:
    stream = HELLO + RESULT + RESULT[:half] + b"\n" + HELLO + RESULT
    conversation = Conversation()
    read = b"".join(conversation.feed(piece) for piece in split(stream, cuts) if not conversation.over)
    assert conversation.over
    *lines, _ = read.split(b"\n")
    assert [line for line in lines if line] == [HELLO[:-1], RESULT[:-1]]


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_broken_line_that_no_hello_follows_reaches_the_host_as_it_is(cuts: list[int]) -> None:
    stream = HELLO + b"broken\n[]\n" + RESULT + b"broken\n" + b"x" * (wire.MAX_FRAME_TO_HOST + 1)
    conversation = Conversation()
    assert b"".join(conversation.feed(piece) for piece in split(stream, cuts)) == stream
    assert not conversation.over


@pytest.mark.parametrize("code", ["refused", "bad_version", "bad_frame"])
def test_refusal_of_the_hello_reaches_the_host(code: str) -> None:
    refusal = wire.encode({"t": "error", "id": 0, "code": code, "message": "no"})
    assert Conversation().feed(b"\n" + refusal) == refusal


def test_endless_line_before_the_hello_takes_bounded_memory() -> None:
    conversation = Conversation()
    for _ in range(100):
        assert conversation.feed(b"x" * (256 << 10)) == b""
    assert conversation.feed(b"\n" + HELLO) == HELLO


async def test_only_stdout_reaches_the_reader_and_writes_reach_the_engine_as_they_are() -> None:
    theirs, ours = socket.socketpair()
    channel = await attached(ours, "nonce")
    engine_reader, engine = await asyncio.open_connection(sock=theirs)
    engine.write(
        engine_frame(2, b"agent: a remark\n") + engine_frame(1, b"\n" + HELLO[:5]) + engine_frame(1, HELLO[5:])
    )
    assert await channel.reader.readline() == HELLO
    channel.writer.write(b"as it is\n")
    assert await engine_reader.readline() == b"as it is\n"
    engine.close()
    assert await channel.reader.read() == b""
    await channel.close()
    await engine.wait_closed()


async def test_host_whose_place_another_takes_reads_the_end_of_its_stream() -> None:
    theirs, ours = socket.socketpair()
    channel = await attached(ours, "nonce")
    theirs.sendall(engine_frame(1, HELLO + RESULT[:9]) + engine_frame(1, b"\n") + engine_frame(1, HELLO))
    assert await asyncio.wait_for(channel.reader.read(1 << 20), 20) in (HELLO, HELLO + RESULT[:9])
    while piece := await asyncio.wait_for(channel.reader.read(1 << 20), 20):
        assert b"\n" not in piece
    await channel.close()
    theirs.close()


async def test_slow_host_holds_the_engine_back_instead_of_filling_memory() -> None:
    theirs, ours = socket.socketpair()
    channel = await attached(ours, "nonce")
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(theirs, engine_frame(1, HELLO))
    piece = engine_frame(1, b"x" * (60 << 10))
    sent = 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            while sent < 64 << 20:
                await loop.sock_sendall(theirs, piece)
                sent += len(piece)
    assert sent < 16 << 20
    await channel.close()
    theirs.close()


async def test_closing_while_the_engine_is_silent_ends_at_once() -> None:
    theirs, ours = socket.socketpair()
    channel = await attached(ours, "nonce")
    await asyncio.wait_for(channel.close(), 5)
    assert theirs.recv(1) == b""
    theirs.close()


async def test_opening_that_is_given_up_at_any_moment_ends_the_attachment() -> None:
    given_up = 0
    for steps in range(1, 20):  # of the loop, from where it has begun
        theirs, ours = socket.socketpair()
        theirs.settimeout(20)
        opening = asyncio.create_task(attached(ours, "nonce"))
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        (channel,) = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(channel, BaseException):
            given_up += 1
        else:
            await channel.close()
        await asyncio.sleep(0)
        assert theirs.recv(1) == b""
        theirs.close()
    assert 3 <= given_up < 19
