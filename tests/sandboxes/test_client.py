"""The host's end of the wire against agents that are slow, gone, or lie."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from sandboxes import client as client_module
from sandboxes.agent import wire
from sandboxes.backends import unix_channel
from sandboxes.backends.base import StreamChannel
from sandboxes.client import AgentClient, Bound
from sandboxes.errors import (
    AttemptUnknown,
    CallRefused,
    ChannelLost,
    ChannelStalled,
    NoCapacity,
    SandboxError,
    StateLost,
    WireError,
)
from sandboxes.events import Printed, Started
from sandboxes.spec import Outcome, PythonCall
from sandboxes.testing.store_suite import attempt_of, settled

HELLO: dict[str, object] = {
    "t": "hello",
    "id": 0,
    "v": wire.VERSION,
    "sandbox": "s",
    "python": "3.11",
    "state": "idle",
    "claim": None,
    "epoch": 1,
    "sequence": 0,
    "running": None,
    "kept": [],
}
Script = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A scripted agent: what it says to each request. `prompt`: frames are taken as they arrive, where that is
    possible; else a task reads all of them."""

    prompt = True

    def __init__(self, hello: bytes, script: Script) -> None:
        self.requests: list[dict[str, object]] = []
        self._hello = hello
        self._script = script
        self._task: asyncio.Task[None] | None = None

    async def channel(self) -> StreamChannel:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs, limit=1 << 26)
        self._task = asyncio.create_task(self._serve(reader, writer))
        opened = unix_channel.streams(ours) if self.prompt else asyncio.open_connection(sock=ours)
        return StreamChannel(*await opened, nonce="n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            json.loads(await reader.readline())
            writer.write(self._hello)
            while line := await reader.readline():
                frame = json.loads(line)
                self.requests.append(frame)
                await self._script(frame, writer)
        except OSError:
            return
        finally:
            writer.close()

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture(autouse=True, params=[True, False], ids=["prompt", "task"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "prompt", request.param)


@pytest.fixture
async def peers() -> AsyncIterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        await peer.end()


async def silent(frame: dict[str, object], writer: asyncio.StreamWriter) -> None:
    return None


def says(*lines: bytes) -> Script:
    async def script(frame: dict[str, object], writer: asyncio.StreamWriter) -> None:
        ident = str(frame["id"]).encode()
        writer.write(b"".join(line.replace(b"%ID%", ident) for line in lines))

    return script


def line(t: str, **fields: object) -> bytes:
    return wire.encode({"t": t, "id": "%ID%", **fields}).replace(b'"%ID%"', b"%ID%")


def result(attempt: str = "a", **changes: object) -> bytes:

    outcome = dataclasses.asdict(settled(attempt_of(attempt)).outcome)  # type: ignore[arg-type]  # it has one
    return line("result", **{**outcome, **changes})


async def connected(peers: list[Peer], script: Script, hello: bytes | None = None) -> AgentClient:
    peer = Peer(wire.encode(HELLO) if hello is None else hello, script)
    peers.append(peer)
    return await AgentClient.connect(await peer.channel())


async def execute(client: AgentClient, on_event: Callable[[object], None] | None = None) -> Outcome:
    return await client.execute("a", "d", PythonCall("1"), Bound(0.2, 0.0), cap=100, queued_at=0.0, on_event=on_event)


async def test_output_and_outcome_of_an_execution_arrive_whatever_empty_lines_are_between(peers: list[Peer]) -> None:
    script = says(
        b"\n",
        line("accepted", sequence=4, epoch=2),
        line("started", sequence=4, epoch=2, at=1.0),
        line("output", text="ab"),
        b"\n\n",
        line("output", text="c"),
        result(),
    )
    client = await connected(peers, script)
    events: list[object] = []
    outcome = await execute(client, events.append)
    assert outcome == settled(attempt_of("a")).outcome
    assert events == [Started("a", 2, 4), Printed("a", "ab"), Printed("a", "c")]
    await client.close()
    assert not client.alive


GARBAGE = [
    b"not json\n",
    b"[]\n",
    b'{"t":"ping","id":%ID%}\n',
    b'{"t":"result","id":%ID%}\n',
    b'{"t":"result","id":%ID%,"receipt":' + b"[" * 100_000 + b"\n",
    b'{"t":"ok","id":%ID%,"n":' + b"9" * 10_000 + b"}\n",
    b'{"t":"error","id":%ID%,"code":"format-the-disk","message":"x"}\n',
    b'{"t":"error","id":%ID%,"code":["failed"],"message":"x"}\n',
    b'{"t":"error","id":0,"code":"bad_frame","message":"x"}\n',
    b'{"t":"ok","id":%ID%}\n',
    b'{"t":"output","id":%ID%,"text":7}\n',
    b'{"t":"started","id":%ID%,"sequence":-1,"epoch":1,"at":1}\n',
    b"\xff\xfe\n",
    b"x" * (wire.MAX_FRAME_TO_HOST + 2),
    result("another"),
    result(images=[{"path": "/x", "mime": 7}]),
    result(images=[{"path": "/x", "mime": "image/png"}] * 5000),
    result(notes="one"),
    result(exit_code="%").replace(b'"%"', b"1e400"),
    line("accepted", sequence=1, epoch=1) * 100,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda garbage: repr(garbage[:40]))
async def test_what_is_not_of_the_protocol_ends_the_connection_for_all_who_wait(
    peers: list[Peer], garbage: bytes
) -> None:
    async def script(frame: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if frame["t"] == "exec":
            await says(garbage)(frame, writer)

    client = await connected(peers, script)
    other = asyncio.create_task(client.ping())
    with pytest.raises(WireError):
        await execute(client)
    with pytest.raises(WireError):
        await other
    assert not client.alive
    with pytest.raises(WireError):
        await client.ping()
    await client.close()


async def test_text_that_no_encoding_takes_is_replaced(peers: list[Peer]) -> None:
    client = await connected(peers, says(result(value="a\ud800b")))
    outcome = await execute(client)
    assert (outcome.value or "").encode().startswith(b"a")
    assert "\ufffd" in (outcome.value or "")
    await client.close()


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (b"", ChannelLost),
        (b"junk\n", WireError),
        (wire.encode({**HELLO, "v": 99}), WireError),
        (wire.encode({**HELLO, "kept": [[]]}), WireError),
        (wire.encode({**HELLO, "claim": "x"}), WireError),
        (wire.encode({**HELLO, "t": "ok"}), WireError),
        (wire.encode({"t": "error", "id": 0, "code": "refused", "message": "no"}), WireError),
    ],
)
async def test_a_handshake_that_is_wrong_ends_with_an_error(
    peers: list[Peer], hello: bytes, error: type[SandboxError]
) -> None:
    async def leave(frame: dict[str, object], writer: asyncio.StreamWriter) -> None:
        return None

    peer = Peer(hello, leave)
    peers.append(peer)
    channel = await peer.channel()
    if not hello:
        await peer.end()
    with pytest.raises(error):
        await AgentClient.connect(channel)


async def test_an_agent_that_never_answers_is_given_up_within_the_bound(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REPLY_S", 0.05)
    monkeypatch.setattr(client_module, "MARGIN_S", 0.05)
    client = await connected(peers, silent)
    with pytest.raises(ChannelStalled, match="the result can be fetched again"):
        await execute(client)
    assert not client.alive
    await client.close()
    started = says(line("accepted", sequence=1, epoch=1), line("started", sequence=1, epoch=1, at=1.0))
    client = await connected(peers, started)
    with pytest.raises(ChannelStalled):
        await execute(client)
    await client.close()


async def test_a_connection_that_ends_tells_everybody_who_waits_and_its_owner(peers: list[Peer]) -> None:
    peer = Peer(wire.encode(HELLO), silent)
    peers.append(peer)
    lost = asyncio.Event()
    client = await AgentClient.connect(await peer.channel(), on_lost=lost.set)
    waiting = [asyncio.create_task(execute(client)), asyncio.create_task(client.ping())]
    await asyncio.sleep(0)
    await peer.end()
    for task in waiting:
        with pytest.raises(ChannelLost, match="transport lost"):
            await task
    await asyncio.wait_for(lost.wait(), 5)
    await client.close()
    await client.close()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("unknown", AttemptUnknown),
        ("bad_request", CallRefused),
        ("not_found", CallRefused),
        ("claimed", StateLost),
        ("failed", SandboxError),
    ],
)
async def test_an_agents_errors_are_typed_and_leave_the_connection_open(
    peers: list[Peer], code: str, error: type[SandboxError]
) -> None:
    client = await connected(peers, says(line("error", code=code, message="m" * 10_000)))
    with pytest.raises(error) as raised:
        await client.ping()
    assert len(raised.value.message) < 600
    assert client.alive
    await client.close()


async def test_replies_for_which_nobody_waits_are_dropped(peers: list[Peer]) -> None:
    strays = b'{"t":"ok","id":999}\n{"t":"ok","id":"x"}\n{"t":"ok"}\n{"t":"ok","id":true}\n'
    client = await connected(peers, says(strays, line("ok")))
    await client.ping()
    await client.ping()
    await client.close()


async def test_a_file_larger_than_was_asked_for_is_a_lie(peers: list[Peer]) -> None:
    client = await connected(peers, says(line("data", piece="QUFBQQ==") * 3, line("ok", size=12)))
    assert [piece async for piece in client.get_file("f", 12)] == [b"AAAA"] * 3
    with pytest.raises(WireError):
        assert [piece async for piece in client.get_file("f", 11)] == []
    await client.close()


async def test_a_file_that_nobody_reads_holds_the_connection_and_not_memory(peers: list[Peer]) -> None:
    client = await connected(peers, says(line("data", piece="QUFBQQ==") * 100, line("ok", size=400)))
    pieces = client.get_file("f", 400)
    assert await anext(pieces) == b"AAAA"
    await asyncio.sleep(0.05)
    assert max(waiter.frames.qsize() for waiter in client._waiters.values()) <= client_module.PIECES_AHEAD
    assert len([piece async for piece in pieces]) == 99
    await client.close()


@pytest.mark.parametrize("able", [True, False])
async def test_acknowledgements_go_with_a_call_to_who_takes_them_so(peers: list[Peer], able: bool) -> None:
    async def script(frame: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if frame["t"] == "exec":
            writer.write(wire.encode({"t": "error", "id": frame["id"], "code": "busy", "message": "no"}))

    client = await connected(peers, script, wire.encode({**HELLO, "acks": True} if able else HELLO))
    with pytest.raises(NoCapacity):
        await client.execute("a", "d", PythonCall("1"), Bound(1.0), cap=10, queued_at=0.0, acked=["b"])
    told = [(frame["t"], frame.get("acked"), frame.get("attempts")) for frame in peers[0].requests]
    assert told[-1:] == [("exec", ["b"], None)] if able else told[-2:] == [("ack", None, ["b"]), ("exec", None, None)]
    await client.close()


async def test_a_call_larger_than_a_frame_is_refused_before_it_is_sent(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_TO_AGENT", 1000)
    client = await connected(peers, says(line("ok")))
    with pytest.raises(CallRefused, match="send less"):
        await client.execute("a", "d", PythonCall("x" * 2000), Bound(1), cap=1, queued_at=0.0)
    await client.ping()
    assert [request["t"] for request in peers[0].requests] == ["ping"]
    await client.close()
