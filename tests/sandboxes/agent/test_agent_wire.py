"""The agent's channel: who may speak, what frames mean, what is kept, and that no byte sequence harms it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxes.agent import wire

from .driving import Agent, Frame, Link, eventually, text


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    assert agent.close() == ""


@pytest.fixture
def link(agent: Agent) -> Link:
    return agent.claimed()


# --- who may speak


def test_hello_tells_whose_sandbox_it_is_and_what_is_kept(agent: Agent) -> None:
    link = agent.claimed(epoch=4, sequence=9)
    attempt, ident = link.submit("1")
    result = link.until("result", ident=ident)
    assert (result["receipt"]["epoch"], result["receipt"]["sequence"]) == (4, 10)
    _, hello = agent.hello()
    assert hello["sandbox"] == "box"
    assert hello["claim"] == {"ticket": "t", "session": "s"}
    assert (hello["epoch"], hello["sequence"], hello["kept"]) == (4, 10, [attempt])
    assert hello["state"] == "idle"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"v": wire.VERSION, "nonce": "wrong"}, "refused"),
        ({"v": wire.VERSION, "nonce": "\ud800"}, "refused"),
        ({"v": wire.VERSION}, "refused"),
        ({"v": 999, "nonce": ""}, "bad_version"),
    ],
)
def test_a_wrong_hello_is_refused_and_the_connection_closes(agent: Agent, fields: Frame, code: str) -> None:
    link = agent.connect()
    assert link.ask("hello", **fields)["code"] == code
    with pytest.raises(EOFError):
        link.read()


def test_without_hello_nothing_is_answered(agent: Agent) -> None:
    link = agent.connect()
    assert link.ask("status")["code"] == "refused"
    with pytest.raises(EOFError):
        link.read()


def test_a_peer_from_the_same_pid_namespace_is_refused(tmp_path: Path) -> None:
    agent = Agent(tmp_path, peer_check=True)
    with pytest.raises((EOFError, ConnectionError)):
        agent.hello()
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(10) == 0
    assert agent.close() == ""


def test_code_needs_a_claim_and_a_claim_is_for_one_session(agent: Agent) -> None:
    link, _ = agent.hello()
    assert link.run("1")["code"] == "unclaimed"
    assert link.ask("claim", ticket="t", session="s", epoch=1, sequence=0)["t"] == "ok"
    assert link.ask("claim", ticket="t", session="s", epoch=1, sequence=0)["t"] == "ok"
    assert link.ask("claim", ticket="t", session="other", epoch=1, sequence=0)["code"] == "claimed"


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as peer:
        return peer.connect_ex(str(path)) == 0


def test_a_socket_that_the_agent_makes_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "own.sock"
    agent = Agent(tmp_path, channel={"kind": "listen_path", "path": str(path)})
    assert eventually(lambda: listens(path))  # it exists a moment before
    agent.path = path
    assert path.stat().st_mode & 0o777 == 0o600
    assert agent.claimed().run("1+1")["value"] == "2"
    assert agent.close() == ""


# --- attempts


def test_the_same_attempt_joins_while_it_runs_and_returns_its_result_after(agent: Agent, link: Link) -> None:
    code = "import os\nopen('runs', 'a').write('x')\nimport time\ntime.sleep(0.2)\n7 * 6"
    attempt, first = link.submit(code)
    link.until("started", ident=first)
    _, second = link.submit(code, attempt=attempt)
    assert link.until("result")["value"] == "42"
    assert link.until("result", ident=second)["value"] == "42"
    _, third = link.submit(code, attempt=attempt)
    assert link.until("result", ident=third)["value"] == "42"
    assert (agent.data / "runs").read_text() == "x"


def test_another_digest_is_a_conflict_and_an_acknowledged_attempt_does_not_run_again(link: Link) -> None:
    attempt, ident = link.submit("1")
    link.until("result", ident=ident)
    assert link.run("2", attempt=attempt)["code"] == "conflict"
    assert link.ask("ack", attempts=[attempt, "never"])["t"] == "ok"
    assert link.run("1", attempt=attempt)["code"] == "unknown"
    assert link.ask("attach", attempt=attempt)["code"] == "unknown"


def test_an_execution_brings_acknowledgements_along(agent: Agent, link: Link) -> None:
    first, ident = link.submit("1")
    link.until("result", ident=ident)
    second, ident = link.submit("2", acked=[first, "never"])
    link.until("result", ident=ident)
    assert link.ask("attach", attempt=first)["code"] == "unknown"
    assert agent.hello()[1]["kept"] == [second]
    for wrong in ("x", [1], {}):
        _, ident = link.submit("3", acked=wrong)
        assert link.until("error", "result", ident=ident)["code"] == "bad_request"
    assert agent.hello()[1]["kept"] == [second]


def test_an_execution_outlives_its_connection_and_its_result_is_collected(agent: Agent, link: Link) -> None:
    link.run("x = 41")
    attempt, ident = link.submit("import time\nprint('p')\ntime.sleep(0.2)\nx + 1")
    link.until("started", ident=ident)
    link.close()
    other, hello = agent.hello()
    assert hello["running"] == attempt
    ident = other.send("attach", attempt=attempt)
    result = other.until("result", ident=ident)
    assert (result["value"], text(result)) == ("42", "p\n")


def test_executions_run_one_at_a_time_in_order_of_arrival(link: Link) -> None:
    link.run("seen = []")
    idents = [link.submit(f"seen.append({n})\nseen")[1] for n in range(5)]
    assert link.until("result", ident=idents[-1])["value"] == "[0, 1, 2, 3, 4]"


def test_cancel_climbs_the_ladder_and_one_that_waits_never_starts(link: Link) -> None:
    running, first = link.submit("print('a')\nwhile True: pass")
    waiting, second = link.submit("1")
    link.until("started", ident=first)
    assert link.ask("cancel", attempt=waiting, why="cancel")["t"] in ("ok", "error")
    link.send("cancel", attempt=running, why="cancel")
    result = link.until("result", ident=first)
    assert result["receipt"]["ending"] == "interrupted"
    assert result["receipt"]["cause"]["kind"] == "cancel"
    attached = link.send("attach", attempt=waiting)
    assert link.until("result", ident=attached)["receipt"]["ending"] == "never_started"
    assert second != first


def test_a_host_that_reads_nothing_delays_nobody(agent: Agent, link: Link) -> None:
    stalled = agent.claimed()
    stalled.submit("for _ in range(40000): print('x' * 99)", cap=100_000)
    for _ in range(200):
        stalled.send("status")
    assert link.run("1+1")["value"] == "2"
    result = stalled.until("result")
    assert result["output"]["cut_characters"] == 4_000_000 - 100_000


def test_user_code_that_takes_all_cpu_does_not_stop_the_channel(link: Link) -> None:
    code = "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        while True: pass\nwhile True: pass"
    attempt, ident = link.submit(f"{code[:9]}\nprint('begun', flush=True){code[9:]}", timeout=300.0)
    link.until("output")
    for _ in range(20):
        assert link.ask("ping")["t"] == "ok"
    assert link.ask("cancel", attempt=attempt, why="operator")["t"] == "ok"
    assert link.until("result", ident=ident)["receipt"]["ending"] == "interrupted"


def test_a_frame_larger_than_the_host_takes_is_never_sent(link: Link) -> None:
    result = link.run("print('\\U0001f600' * 100_000)\n'\\U0001f600' * 90_000", cap=100_000)
    assert len(json.dumps(result)) < wire.MAX_FRAME_TO_HOST
    assert result["receipt"]["ending"] == "ok"


def test_interpreters_lies_stay_within_its_own_cell(link: Link) -> None:
    code = """
import os
for fd in range(3, 1100):
    try:
        os.write(fd, b'{"t":"done","n":1,"outcome":"ok","value":"forged","receipt":{"session":"other"}}\\n')
    except OSError:
        pass
"""
    result = link.run(code)
    assert result["receipt"]["session"] == "s"
    assert result["receipt"]["sequence"] == 1
    assert link.run("1+1")["t"] == "result"


def test_stop_ends_the_agent(agent: Agent, link: Link) -> None:
    assert link.ask("stop")["t"] == "ok"
    assert agent.process.wait(10) == 0


def test_an_agent_that_no_host_talks_to_ends_by_its_fence(tmp_path: Path) -> None:
    agent = Agent(tmp_path, fence_s=0.3)
    assert agent.process.wait(10) == 0
    assert agent.close() == ""


def test_a_wrong_configuration_is_said_in_one_sentence(tmp_path: Path) -> None:
    agent = Agent(tmp_path, nonce="")
    assert agent.process.wait(10) == 2
    assert agent.close() == "agent: configuration: nonce is not a text\n"


# --- the attach stream


def test_over_stdio_a_new_host_resynchronizes_after_half_a_frame(tmp_path: Path) -> None:
    agent = Agent(tmp_path, stdio=True)
    link = agent.claimed()
    attempt, ident = link.submit("6 * 7")
    link.until("result", ident=ident)
    link.write(b'{"t":"exec","id":9,"attempt":"half')
    link.write(b"\n")
    assert link.until("error")["code"] == "bad_frame"
    hello = link.ask("hello", v=wire.VERSION, nonce=agent.nonce)
    assert hello["kept"] == [attempt]
    again = link.send("attach", attempt=attempt)
    assert link.until("result", ident=again)["value"] == "42"
    assert link.ask("stop")["t"] == "ok"
    assert agent.process.wait(10) == 0
    assert agent.close() == ""


# --- hostile bytes

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_frames = st.builds(
    lambda kind, fields: {**fields, "t": kind},
    st.sampled_from(sorted(wire.REQUESTS - {"stop", "hello", "restart"})) | st.text(max_size=6),
    st.dictionaries(
        st.sampled_from(
            ["id", "attempt", "digest", "kind", "call", "op", "path", "limit", "why", "attempts", "timeout"]
        ),
        _values,
    ),
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = Agent(tmp_path_factory.mktemp("fuzzed"))
    agent.claimed()
    yield agent
    assert agent.close() == ""


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_frames, max_size=5))
def test_frames_with_wrong_fields_are_answered_and_change_nothing(fuzzed: Agent, frames: list[Frame]) -> None:
    link, hello = fuzzed.hello()
    try:
        for frame in frames:
            link.write(json.dumps(frame).encode() + b"\n")
    except ConnectionError:
        assert any(frame["t"] not in wire.REQUESTS for frame in frames)
    link.close()
    other, after = fuzzed.hello()
    other.close()
    assert after["claim"] == hello["claim"]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_close_their_connection_only(fuzzed: Agent, data: bytes) -> None:
    link, _ = fuzzed.hello()
    try:
        link.write(data + b"\n")
        link.write(b"}\n")
        while True:
            frame = link.read()
            assert frame["t"] in wire.REPLIES
    except (EOFError, ConnectionError):
        pass
    other, _ = fuzzed.hello()
    assert other.ask("ping")["t"] == "ok"
    link.close()
    other.close()


def test_a_line_without_end_is_cut_off(agent: Agent) -> None:
    link = agent.connect()
    try:
        for _ in range(100):
            link.write(b"x" * 4096)
            if select.select([link._source], [], [], 0)[0]:
                break
    except OSError:
        pass
    other, _ = agent.hello()
    assert other.ask("ping")["t"] == "ok"
    assert os.path.exists(f"/proc/{agent.pid}")
