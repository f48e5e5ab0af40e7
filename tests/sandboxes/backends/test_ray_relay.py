"""The relay of a cluster's node, attacked and used, in front of an agent that only echoes. No Ray is needed."""

# ruff: noqa: ASYNC110 - what these wait for tells nobody

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxes.backends import ray_peer, ray_relay, ray_wire, unix_channel
from sandboxes.backends.base import Channel
from sandboxes.backends.ray_names import Place, stored
from sandboxes.errors import BackendError, EngineUnavailable, NodeGone, StateLost
from sandboxes.owner import Owner
from sandboxes.spec import Handle

OWNER = Owner("0123456789abcdef", b"k" * 32)
NODE = "aaaaaaaaaaaa"
ONE = Handle("ray", "k-1", "1" * 32, "i-1", "w-1")
TWO = Handle("ray", "k-2", "2" * 32, "i-2", "w-2")
SOON_S = 20.0


class Agent:
    """Echoes, and counts what it got. `flood`: sends that many bytes first, and counts what was taken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.connections = 0
        self.flood = 0
        self.sent = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError):
            while self.sent < self.flood:
                writer.write(b"x" * 65536)
                await writer.drain()
                self.sent += 65536
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write(b"the end")
        writer.close()


@dataclasses.dataclass
class Setting:
    relay: ray_relay.Relay
    place: Place
    agent: Agent

    def peer(self, owner: Owner = OWNER) -> ray_peer.Peer:
        return ray_peer.Peer(owner, self.place)

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """Connected, with the challenge."""
        reader, writer = await asyncio.open_connection(self.place.host, self.place.port)
        return reader, writer, ray_wire.read_greeting(await reader.readline())

    async def answers(self) -> bool:
        """Whether the one who may gets through."""
        channel = await ray_peer.attach(OWNER, self.place, ONE)
        channel.writer.write(b"hello")
        async with asyncio.timeout(SOON_S):
            echoed = await channel.reader.readexactly(5)
        await channel.close()
        return echoed == b"hello"


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    agent = Agent(tmp_path)
    listener = unix_channel.listening(tmp_path, "channel")
    server = await asyncio.start_unix_server(agent.serve, sock=listener)

    async def connect(handle: Handle) -> Channel:
        if handle not in (ONE, TWO):
            raise StateLost("it is not running")
        return await unix_channel.connect(tmp_path, "channel", "", timeout_s=5)

    async def say(arguments: Any) -> Any:
        return {"said": arguments}

    async def fail(arguments: Any) -> Any:
        raise BackendError("no")

    async def hang(arguments: Any) -> Any:
        await asyncio.Event().wait()

    async def break_(arguments: Any) -> Any:
        raise KeyError("unforeseen")

    operations = {"say": say, "fail": fail, "hang": hang, "break": break_}
    relay = ray_relay.Relay(OWNER, NODE, connect, lambda handle: handle == ONE, operations)
    port = await relay.start("127.0.0.1", 0)
    yield Setting(relay, Place("127.0.0.1", port, NODE), agent)
    await relay.close()
    server.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the connection ends."""
    async with asyncio.timeout(SOON_S):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


def header(mac_key: bytes, number: str, **fields: Any) -> bytes:
    return ray_wire.signed(mac_key, number, {"node": NODE, "nonce": "n" * 32, **fields})


# --- who may ---------------------------------------------------------------------------------------------------------


async def test_bytes_go_both_ways_as_they_are(setting: Setting) -> None:
    channel = await ray_peer.attach(OWNER, setting.place, ONE)
    data = bytes(range(256)) * 4096
    channel.writer.write(data)
    async with asyncio.timeout(SOON_S):
        assert await channel.reader.readexactly(len(data)) == data
    await channel.close()


async def test_another_secret_is_refused_for_control_and_for_sandboxes(setting: Setting) -> None:
    stranger = Owner(OWNER.id, b"x" * 32)
    with pytest.raises(EngineUnavailable, match="same owner file"):
        await ray_peer.attach(stranger, setting.place, ONE)
    with pytest.raises(EngineUnavailable, match="same owner file"):
        await setting.peer(stranger).call("say", 5)
    assert setting.agent.connections == 0
    assert setting.relay.refused == 2


async def test_a_relay_without_the_secret_is_not_believed() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ray_wire.greeting("0" * 32))
        await reader.readline()
        writer.write(ray_wire.signed(b"w" * 32, "n" * 32, {"ok": True}))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        place = Place("127.0.0.1", server.sockets[0].getsockname()[1], NODE)
        with pytest.raises(EngineUnavailable, match="do not know each other"):
            await ray_peer.attach(OWNER, place, ONE)


async def test_what_opens_one_sandbox_opens_no_other_and_no_control(setting: Setting) -> None:
    key_of_one = ray_wire.key(OWNER, ray_wire.ATTACH, ONE.sandbox_id)
    for fields in (
        {"op": "attach", "handle": stored(TWO)},
        {"op": "control"},
        {"op": "control", "handle": stored(ONE)},
        {"op": "attach", "handle": stored(dataclasses.replace(ONE, sandbox_id=""))},
    ):
        reader, writer, number = await setting.raw()
        writer.write(header(key_of_one, number, **fields))
        assert b"refused" in await ended(reader)
        writer.close()
    assert setting.agent.connections == 0


async def test_a_recorded_header_opens_nothing_a_second_time(setting: Setting) -> None:
    reader, writer, number = await setting.raw()
    recorded = header(ray_wire.key(OWNER, ray_wire.ATTACH, ONE.sandbox_id), number, op="attach", handle=stored(ONE))
    writer.write(recorded)
    assert b"ok" in await reader.readline()
    writer.close()
    reader, writer, _ = await setting.raw()
    writer.write(recorded)
    assert b"refused" in await ended(reader)
    writer.close()
    assert setting.agent.connections == 1


async def test_a_header_for_an_earlier_life_of_the_node_is_told_so(setting: Setting) -> None:
    earlier = dataclasses.replace(setting.place, node="b" * 12)
    with pytest.raises(NodeGone):
        await ray_peer.attach(OWNER, earlier, ONE)
    with pytest.raises(NodeGone):
        await ray_peer.Peer(OWNER, earlier).call("say", 5)


async def test_who_attaches_is_told_whether_the_node_is_sure(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sure(handle: Handle) -> bool:
        channel = await ray_peer.attach(OWNER, setting.place, handle)
        await channel.close()
        return channel.sure

    assert [await sure(handle) for handle in (ONE, TWO)] == [True, False]
    monkeypatch.setattr(ray_peer, "JUST_S", 0.0)
    assert not await sure(ONE), "an answer that was long on its way says nothing of now"


async def test_another_instance_is_refused_with_its_reason(setting: Setting) -> None:
    with pytest.raises(StateLost, match="not running"):
        await ray_peer.attach(OWNER, setting.place, dataclasses.replace(ONE, instance="another"))


# --- who may not, and tries ------------------------------------------------------------------------------------------

SIGNED = b"0" * 64 + b" "
GARBAGE: dict[str, bytes] = {
    "binary": b"\x00\xff\xfe" * 100 + b"\n",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no signature": b'{"op":"control"}\n',
    "not hex": "é".encode() * 32 + b" {}\n",
    "not a table": SIGNED + b"[]\n",
    "not JSON": SIGNED + b"{\n",
    "deep": SIGNED + b"[" * 4000 + b"\n",
    "no operation": SIGNED + b"{}\n",
    "odd handle": SIGNED + b'{"op":"attach","handle":7}\n',
    "odd fields": SIGNED + json.dumps({"op": "attach", "handle": {**stored(ONE), "key": 7}}).encode() + b"\n",
    "endless line": b"x" * (ray_wire.MAX_LINE + 10),
    "long line": b"x" * (ray_wire.MAX_LINE + 10) + b"\n",
    "two lines": SIGNED + b"{}\n" + SIGNED + b"{}\n",
}


@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_is_refused_in_one_line(setting: Setting, sent: bytes) -> None:
    reader, writer, _ = await setting.raw()
    writer.write(sent)
    assert await ended(reader) in (b'{"error":"refused"}\n', b"")
    writer.close()
    assert setting.agent.connections == 0
    assert await setting.answers()


async def test_bytes_behind_a_right_header_are_refused(setting: Setting) -> None:
    reader, writer, number = await setting.raw()
    line = header(ray_wire.key(OWNER, ray_wire.ATTACH, ONE.sandbox_id), number, op="attach", handle=stored(ONE))
    writer.write(line + b"too early")
    assert b"refused" in await ended(reader)
    writer.close()


async def test_who_only_waits_is_cut_off(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_relay, "HANDSHAKE_S", 0.2)
    silent, slow = await setting.raw(), await setting.raw()
    assert await ended(silent[0]) == b""

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                slow[1].write(b"x")
                await slow[1].drain()
                await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    assert await ended(slow[0]) == b""
    dripping.cancel()
    for _, writer, _ in (silent, slow):
        writer.close()
    assert not setting.relay.waiting


async def test_many_who_only_wait_keep_nobody_out(setting: Setting) -> None:
    crowd = [await setting.raw() for _ in range(ray_relay.MAX_WAITING + 60)]
    assert await setting.answers()
    assert len(setting.relay.waiting) <= ray_relay.MAX_WAITING
    for _, writer, _ in crowd:
        writer.close()


# --- the stream ------------------------------------------------------------------------------------------------------


async def test_who_does_not_read_stops_the_sender_and_nothing_is_piled_up(setting: Setting) -> None:
    setting.agent.flood = 256 << 20
    channel = await ray_peer.attach(OWNER, setting.place, ONE)
    channel.writer.transport.pause_reading()  # type: ignore[attr-defined]
    before = -1
    async with asyncio.timeout(SOON_S):
        while setting.agent.sent != before:
            before = setting.agent.sent
            await asyncio.sleep(0.5)
    assert 0 < before < 64 << 20  # the kernel's buffers, and little more
    setting.agent.flood = 0
    assert await setting.answers()  # others are served meanwhile
    channel.writer.transport.abort()


async def test_an_end_of_one_direction_is_handed_on_and_the_other_goes_on(setting: Setting) -> None:
    channel = await ray_peer.attach(OWNER, setting.place, ONE)
    channel.writer.write(b"all of it, ")
    channel.writer.write_eof()
    async with asyncio.timeout(SOON_S):
        assert await channel.reader.read() == b"all of it, the end"
    await channel.close()


async def test_connections_are_counted_by_sandbox_and_forgotten(setting: Setting) -> None:
    channels = [await ray_peer.attach(OWNER, setting.place, handle) for handle in (ONE, ONE, TWO)]
    assert setting.relay.attached == {ONE.sandbox_id: 2, TWO.sandbox_id: 1}
    for channel in channels:
        await channel.close()
    async with asyncio.timeout(SOON_S):
        while setting.relay.attached or setting.relay.open:
            await asyncio.sleep(0.01)


# --- control ---------------------------------------------------------------------------------------------------------


async def test_control_answers_many_at_once_and_tells_errors_apart(setting: Setting) -> None:
    peer = setting.peer()
    answers = await asyncio.gather(*(peer.call("say", 5, number=number) for number in range(200)))
    assert [answer["said"]["number"] for answer in answers] == list(range(200))
    with pytest.raises(BackendError, match=r"^no$"):
        await peer.call("fail", 5)
    with pytest.raises(EngineUnavailable, match="KeyError"):
        await peer.call("break", 5)
    with pytest.raises(BackendError, match="another version"):
        await peer.call("unheard_of", 5)
    with pytest.raises(EngineUnavailable, match="did not finish hang"):
        await peer.call("hang", 0.1)
    async with asyncio.timeout(SOON_S):
        while setting.relay.tasks:  # what was given up is ended there, too
            await asyncio.sleep(0.01)
    await peer.close()


@pytest.mark.parametrize(
    "line", [b"not JSON\n", b"[]\n", b'{"id":"x","op":"say"}\n', b'{"op":"say"}\n', b"[" * 9000 + b"\n"]
)
async def test_garbage_in_control_ends_that_connection_alone(setting: Setting, line: bytes) -> None:
    reader, writer, number = await setting.raw()
    writer.write(header(ray_wire.key(OWNER, ray_wire.CONTROL, ""), number, op="control"))
    assert b"ok" in await reader.readline()
    writer.write(line)
    assert await ended(reader) == b""
    writer.close()
    assert await setting.answers()


async def test_a_peer_connects_again_when_its_connection_broke(setting: Setting) -> None:
    peer = setting.peer()
    await peer.call("say", 5)
    hanging = asyncio.create_task(peer.call("hang", 5))
    await asyncio.sleep(0.05)
    for connection in list(setting.relay.open):
        connection.abort()
    with pytest.raises(EngineUnavailable):
        await hanging
    assert await peer.call("say", 5, again=True) == {"said": {"again": True}}
    await peer.close()


async def test_a_machine_that_refuses_is_told_from_one_that_is_silent(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, unused_tcp_port_factory: Callable[[], int]
) -> None:
    with pytest.raises(ray_peer.Unreachable) as refused:
        await ray_peer.attach(OWNER, Place("127.0.0.1", unused_tcp_port_factory(), NODE), ONE)
    assert refused.value.refused
    monkeypatch.setattr(ray_peer, "GREET_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        place = Place("127.0.0.1", server.sockets[0].getsockname()[1], NODE)
        with pytest.raises(ray_peer.Unreachable) as quiet:
            await ray_peer.attach(OWNER, place, ONE)
    assert not quiet.value.refused
