"""Whatever bytes a sandbox sends, the host ends with a result or one of its own errors, in bounded memory and time."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sandboxes.agent import wire
from sandboxes.backends import unix_channel
from sandboxes.backends.base import StreamChannel
from sandboxes.client import AgentClient, Bound
from sandboxes.errors import SandboxError
from sandboxes.spec import Outcome, PythonCall

HELLO = {
    "t": "hello", "id": 0, "v": wire.VERSION, "sandbox": "s", "python": "3.11", "state": "idle", "claim": None,
    "epoch": 1, "sequence": 0, "running": None, "kept": [],
}  # fmt: skip
RECEIPT = {
    "session": "s", "epoch": 1, "sequence": 1, "attempt_id": "a", "digest": "d", "queued_at": 1.0, "started_at": 1.0,
    "ended_at": 2.0, "ending": "ok", "state": "kept", "bytes_out": 0, "bytes_cut": 0, "cause": None,
}  # fmt: skip
OUTPUT = {"head": "", "tail": "", "cut_characters": 0, "file": None, "file_complete": True}
RESULT = {
    "t": "result", "id": 1, "receipt": RECEIPT, "output": OUTPUT, "background": None, "value": None, "error": None,
    "images": [], "files": [], "exit_code": None, "notes": [],
}  # fmt: skip

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
frames = st.builds(
    lambda kind, ident, more: {**more, "t": kind, "id": ident},
    st.sampled_from(sorted(wire.REPLIES)) | st.text(max_size=8),
    st.sampled_from([0, 1, 2, None, "1", -1, True]) | anything,
    st.dictionaries(st.sampled_from([*RESULT, *HELLO, "text", "piece", "code", "message", "at"]), anything),
)


@st.composite
def spoilt(draw: st.DrawFn) -> dict[str, Any]:
    """A right frame with one field that is not."""
    frame = json.loads(json.dumps(draw(st.sampled_from([RESULT, HELLO]))))
    at = frame
    while True:
        key = draw(st.sampled_from(sorted(at)))
        if isinstance(at[key], dict) and draw(st.booleans()):
            at = at[key]
            continue
        at[key] = draw(anything)
        return dict(frame)


lines = st.one_of(
    st.binary(max_size=200),
    frames.map(lambda frame: json.dumps(frame).encode()),
    spoilt().map(lambda frame: json.dumps(frame).encode()),
    st.just(json.dumps(HELLO).encode()),
    st.just(json.dumps(RESULT).encode()),
    st.integers(1, 3000).map(lambda deep: b"[" * deep + b"]" * deep),
)


async def converse(sent: list[bytes], *, prompt: bool) -> Outcome | SandboxError:
    """What a host has of an agent that says hello, then these lines, and goes. `prompt`: frames are taken as they
    arrive, where that is possible; else a task reads all of them."""
    ours, theirs = socket.socketpair()
    _, agent = await asyncio.open_connection(sock=theirs)
    reader, writer = await (unix_channel.streams(ours) if prompt else asyncio.open_connection(sock=ours))
    agent.write(json.dumps(HELLO).encode() + b"\n")
    try:
        async with asyncio.timeout(10):
            client = await AgentClient.connect(StreamChannel(reader, writer, "nonce"))
            asked = client.execute("a", "d", PythonCall("1"), Bound(5.0, 0.1), cap=100, queued_at=1.0)
            call = asyncio.create_task(asked)
            await asyncio.sleep(0)
            agent.write(b"\n".join([*sent, b""]))
            agent.close()
            try:
                return await call
            except SandboxError as error:
                return error
            finally:
                await client.close()
    finally:
        agent.close()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(lines, max_size=6), st.booleans())
def test_fuzzed_frames_end_in_a_result_or_an_error_of_ours(sent: list[bytes], prompt: bool) -> None:
    ended = asyncio.run(converse(sent, prompt=prompt))
    assert isinstance(ended, Outcome | SandboxError)
    if isinstance(ended, Outcome):
        assert ended.receipt.attempt_id == "a"


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines)
@example(b'{"t":"error","":0}')
def test_a_fuzzed_handshake_ends_in_a_connection_or_an_error_of_ours(first: bytes) -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair()
        _, agent = await asyncio.open_connection(sock=theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        agent.write(first + b"\n")
        agent.write_eof()
        try:
            client = await asyncio.wait_for(AgentClient.connect(StreamChannel(reader, writer, "nonce")), 10)
        except SandboxError:
            pass
        else:
            assert client.hello.python
            await client.close()
        finally:
            agent.close()

    asyncio.run(work())
