"""Connecting to what lies in a directory that a sandbox may have written to."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sandboxes.backends import unix_channel
from sandboxes.errors import EngineUnavailable, StateLost


async def test_bytes_go_both_ways_also_below_a_path_longer_than_a_socket_address(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with unix_channel.listening(directory, "channel") as listener:
        channel = await unix_channel.connect(directory, "channel", "n", timeout_s=5)
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"hello\n")
            assert await channel.reader.readline() == b"hello\n"
            channel.writer.write(b"there")
            await channel.writer.drain()
            assert peer.recv(10) == b"there"
            assert channel.nonce == "n"
            await channel.close()
            assert peer.recv(10) == b""


async def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "directory"
    elsewhere.mkdir()
    directory.mkdir()
    with unix_channel.listening(elsewhere, "engine") as listener:
        listener.settimeout(0)
        (directory / "channel").symlink_to(elsewhere / "engine")
        (tmp_path / "link").symlink_to(elsewhere)
        with pytest.raises(StateLost, match="not a socket"):
            await unix_channel.connect(directory, "channel", "n", timeout_s=5)
        with pytest.raises(StateLost):
            await unix_channel.connect(tmp_path / "link", "engine", "n", timeout_s=5)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("kind", ["file", "fifo", "directory", "nothing", "deaf"])
async def test_what_is_not_a_listening_socket_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "channel"
    if kind == "file":
        path.write_text("")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "deaf":
        unix_channel.listening(tmp_path, "channel").close()
    with pytest.raises(StateLost):
        await unix_channel.connect(tmp_path, "channel", "n", timeout_s=5)


async def test_one_who_accepts_nobody_is_an_error_after_a_bounded_wait(tmp_path: Path) -> None:
    with unix_channel.listening(tmp_path, "channel", backlog=0):
        waiting = []
        try:
            while True:
                waiting.append(unix_channel.connected(tmp_path, "channel"))
        except BlockingIOError:
            pass
        with pytest.raises(EngineUnavailable):
            await unix_channel.connect(tmp_path, "channel", "n", timeout_s=0.1)
        for connection in waiting:
            assert isinstance(connection, socket.socket)
            connection.close()
