"""The agent's socket, which lies in a directory that the host and the container share: attacks on it fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes.agent import wire
from sandboxes.backends import unix_channel
from sandboxes.backends.docker import DockerBackend
from sandboxes.backends.docker_container import CHANNEL, SOCKET
from sandboxes.client import AgentClient
from sandboxes.errors import StateLost, WireError
from sandboxes.spec import Handle
from tests.sandboxes.backends.docker_host import ENGINE, SMALL, DockerHost, engine

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(os.geteuid() != 0, reason="only a root host shares a socket with its containers"),
]

Running = tuple[DockerBackend, Handle, Path]


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    place = DockerHost(tmp_path)
    backend = place.backend()
    await backend.open()
    handle = await backend.launch("k-1", SMALL, "w-1")
    yield backend, handle, tmp_path / "docker" / "channels" / handle.sandbox_id
    await backend.destroy(handle)
    await backend.close()
    assert place.leftovers() == []


def as_user(handle: Handle, code: str) -> str:
    """Runs Python in the container as an ordinary uid, by the engine: what user code could do at most."""
    api = engine()
    try:
        command = api.exec_create(handle.instance, ["python3", "-I", "-c", code], user="201000:201000")
        return str(api.exec_start(command["Id"]).decode())
    finally:
        api.close()


async def test_directory_is_closed_to_user_code_and_to_other_users_of_the_machine(running: Running) -> None:
    _, handle, directory = running
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.parent.stat().st_mode & 0o777 == 0o700
    assert (directory / SOCKET).stat().st_mode & 0o777 == 0o600
    for code in (
        f"import os; os.listdir('{CHANNEL}')",
        f"import os; os.unlink('{CHANNEL}/{SOCKET}')",
        f"import os; os.rename('{CHANNEL}', '{CHANNEL}2')",
        f"import socket; socket.socket(socket.AF_UNIX).connect('{CHANNEL}/{SOCKET}')",
        f"import socket; socket.socket(socket.AF_UNIX).bind('{CHANNEL}/other')",
    ):
        said = as_user(handle, code)
        assert "PermissionError" in said or "Read-only file system" in said, said


async def test_peer_inside_the_container_is_refused_even_as_root_and_with_the_nonce(running: Running) -> None:
    backend, handle, _ = running
    nonce = backend._settings.owner.nonce(handle.sandbox_id)
    hello = wire.encode({"t": "hello", "id": 0, "v": wire.VERSION, "nonce": nonce})
    code = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('{CHANNEL}/{SOCKET}')\n"
        f"s.settimeout(5)\n"
        f"try:\n    s.sendall({hello!r}); print('answer', s.recv(1000))\n"
        f"except OSError as error:\n    print('answer', b'', error)"
    )
    api = engine()
    command = api.exec_create(handle.instance, ["python3", "-I", "-c", code], user="0:0")
    assert api.exec_start(command["Id"]).decode().startswith("answer b''")
    api.close()


async def test_host_without_the_nonce_is_refused_and_the_right_one_is_served_after_it(running: Running) -> None:
    backend, handle, directory = running
    for nonce in ("", "0" * 64, "x" * 100_000):
        reader, writer = await asyncio.open_connection(sock=unix_channel.connected(directory, SOCKET))
        writer.write(wire.encode({"t": "hello", "id": 0, "v": wire.VERSION, "nonce": nonce}))
        said = b""
        with contextlib.suppress(ConnectionResetError):  # it closed without reading all of a long nonce
            said = await asyncio.wait_for(reader.read(), 15)
        assert b'"hello"' not in said
        writer.close()
    client = await AgentClient.connect(await backend.connect(handle))
    assert client.hello.sandbox == handle.sandbox_id
    await client.close()


@pytest.mark.parametrize("planted", ["link to the engine", "dangling link", "file", "directory", "nothing", "fifo"])
async def test_what_was_planted_in_place_of_the_socket_is_not_connected_to(running: Running, planted: str) -> None:
    backend, handle, directory = running
    target = directory / SOCKET
    target.unlink()
    if planted == "link to the engine":
        target.symlink_to(ENGINE.removeprefix("unix://"))
    elif planted == "dangling link":
        target.symlink_to("/nowhere")
    elif planted == "file":
        target.write_text("")
    elif planted == "directory":
        target.mkdir()
    elif planted == "fifo":
        os.mkfifo(target)
    with pytest.raises(StateLost):
        await asyncio.wait_for(backend.connect(handle), 15)


async def test_directory_replaced_by_a_link_is_not_followed(running: Running, tmp_path: Path) -> None:
    backend, handle, directory = running
    elsewhere = tmp_path / "elsewhere"
    directory.rename(elsewhere)
    directory.symlink_to(elsewhere)
    with pytest.raises(StateLost):
        await backend.connect(handle)
    directory.unlink()
    elsewhere.rename(directory)


async def test_impostor_that_answers_in_place_of_the_agent_is_told_by_its_hello(running: Running) -> None:
    backend, handle, directory = running
    (directory / SOCKET).unlink()

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b'{"t":"hello","id":0,"v":1,"sandbox":"another"}\n')
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(lie, sock=unix_channel.listening(directory, SOCKET))
    async with server:
        with pytest.raises((WireError, StateLost)):
            await AgentClient.connect(await backend.connect(handle))


async def test_planted_links_in_the_channel_directory_lead_nowhere_when_it_is_removed(
    running: Running, tmp_path: Path
) -> None:
    backend, handle, directory = running
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    (directory / "link").symlink_to(victim)
    await backend.destroy(handle)
    assert not directory.exists()
    assert (victim / "kept").read_text() == "kept"


async def test_planted_links_and_deep_directories_in_the_workspace_are_removed_and_lead_nowhere(
    running: Running, tmp_path: Path
) -> None:
    backend, handle, _ = running
    victim = tmp_path / "victim"
    victim.mkdir()
    victim.chmod(0o777)
    (victim / "kept").write_text("kept")
    data = tmp_path / "docker" / "workspaces" / "w-1" / "data"
    uid = data.stat().st_uid
    code = (
        f"import os; os.setgid({uid}); os.setuid({uid}); os.chdir('/mnt/data'); os.symlink('{victim}', 'link')\n"
        "for n in range(1500): os.mkdir('d'); os.chdir('d')\n"
        "open('leaf', 'w').close(); print('made')"
    )
    api = engine()
    command = api.exec_create(handle.instance, ["python3", "-I", "-c", code], user="0:0")
    assert api.exec_start(command["Id"]).decode() == "made\n"
    api.close()
    await backend.destroy(handle)
    assert not data.exists()
    assert (victim / "kept").read_text() == "kept"
