"""File requests: what they do, and that neither names nor planted links lead out of the session's directory."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .driving import Agent, Frame, Link


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    (tmp_path / "secret").write_text("secret")
    yield agent
    assert agent.close() == ""


@pytest.fixture
def link(agent: Agent) -> Link:
    return agent.claimed()


def fetch(link: Link, op: str, path: str, limit: int = 1 << 30) -> tuple[bytes, Frame]:
    ident = link.send("files", op=op, path=path, limit=limit)
    content = b""
    while True:
        frame = link.until("data", "ok", "error", ident=ident)
        if frame["t"] != "data":
            return content, frame
        content += base64.b64decode(frame["piece"])


def put(link: Link, path: str, content: bytes, piece: int = 100_000, upload: str = "u1") -> Frame:
    for offset in range(0, max(1, len(content)), piece):
        part = content[offset : offset + piece]
        answer = link.ask(
            "files",
            op="put",
            path=path,
            upload=upload,
            offset=offset,
            piece=base64.b64encode(part).decode(),
            last=offset + piece >= len(content),
        )
        if answer["t"] == "error":
            break
    return answer


def test_a_list_that_is_cut_says_so(link: Link, agent: Agent) -> None:
    for number in range(5001):
        (agent.data / f"{number:04}").touch()
    answer = link.ask("files", op="list", path="")
    assert (len(answer["files"]), answer["complete"]) == (5000, False)
    (agent.data / "0000").unlink()
    assert link.ask("files", op="list", path="")["complete"] is True


def test_a_put_is_no_call_s_change_whether_before_it_or_during_it(link: Link, agent: Agent) -> None:
    link.run("1")
    put(link, "before", b"x")
    assert link.run("2")["files"] == []
    _, ident = link.submit(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nopen('own', 'w').close()"
    )
    link.until("started", ident=ident)
    other, _ = agent.hello()
    put(other, "during", b"x", upload="u2")
    put(other, "go", b"", upload="u3")
    assert link.until("result", ident=ident)["files"] == [{"path": f"{agent.data}/own", "size": 0}]


def test_a_file_that_was_put_and_then_changed_by_a_call_is_that_call_s_change(link: Link, agent: Agent) -> None:
    link.run("1")
    put(link, "a", b"x")
    assert link.run("open('a', 'a').write('y') and None")["files"] == [{"path": f"{agent.data}/a", "size": 2}]


def test_what_is_put_is_listed_read_by_code_and_got_back(link: Link, agent: Agent) -> None:
    content = os.urandom(350_000)
    assert put(link, "deep/er/a.bin", content)["size"] == 350_000
    assert link.run("len(open('deep/er/a.bin', 'rb').read())")["value"] == "350000"
    assert fetch(link, "get", f"{agent.data}/deep/er/a.bin")[0] == content
    listed = {file["path"]: file for file in link.ask("files", op="list", path="")["files"]}
    assert listed[f"{agent.data}/deep/er/a.bin"]["size"] == 350_000
    assert listed[f"{agent.data}/deep"]["kind"] == "directory"


def test_a_put_is_not_seen_before_its_last_piece(link: Link, agent: Agent) -> None:
    half = {"op": "put", "path": "a", "upload": "u", "offset": 0, "piece": "YWI=", "last": False}
    assert link.ask("files", **half)["t"] == "ok"
    assert not (agent.data / "a").exists()
    wrong = link.ask("files", **{**half, "offset": 7, "last": True})
    assert wrong["code"] == "bad_request"
    assert link.ask("files", **{**half, "offset": 2, "last": True})["size"] == 4
    assert (agent.data / "a").read_bytes() == b"abab"


@pytest.mark.parametrize("name", ["a b;$(touch x)`'\"", "-rf", "né☃", "new\nline", "*"])
def test_names_are_data(link: Link, agent: Agent, name: str) -> None:
    assert put(link, name, b"1")["t"] == "ok"
    assert fetch(link, "get", name)[0] == b"1"
    assert [entry.name for entry in agent.data.iterdir() if not entry.name.startswith(".")] == [name]
    assert link.ask("files", op="remove", path=name)["t"] == "ok"


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../secret", "a\0b", "x" * 5000])
def test_a_path_out_of_the_directory_is_refused(link: Link, path: str) -> None:
    assert fetch(link, "get", path)[1]["code"] == "bad_request"
    assert put(link, path, b"1")["code"] == "bad_request"
    assert link.ask("files", op="remove", path=path)["code"] == "bad_request"


def test_planted_links_are_not_followed(link: Link, agent: Agent, tmp_path: Path) -> None:
    (agent.data / "link").symlink_to(tmp_path / "secret")
    (agent.data / "out").symlink_to(tmp_path)
    assert fetch(link, "get", "link")[1]["code"] == "not_found"
    assert fetch(link, "get", "out/secret")[1]["code"] == "not_found"
    assert put(link, "out/new", b"1")["code"] == "not_found"
    assert link.ask("files", op="remove", path="out/secret")["code"] == "not_found"
    assert put(link, "link", b"mine")["t"] == "ok"
    assert (tmp_path / "secret").read_text() == "secret"
    assert not (tmp_path / "new").exists()
    (agent.data / ".uploads").rmdir()
    (agent.data / ".uploads").symlink_to(tmp_path)
    assert put(link, "b", b"1")["code"] == "not_found"


def test_a_planted_outputs_link_is_not_followed_and_the_call_works(link: Link, agent: Agent, tmp_path: Path) -> None:
    (agent.data / ".outputs").symlink_to(tmp_path)
    result = link.run("print('x' * 100_000)")
    assert result["output"]["file"] is None
    assert "could not be saved" in result["notes"][0]
    assert not (tmp_path / "1.txt").exists()


def test_pipes_and_devices_block_nothing(link: Link, agent: Agent) -> None:
    os.mkfifo(agent.data / "pipe")
    assert fetch(link, "get", "pipe")[1]["code"] == "not_found"
    assert fetch(link, "tar", "")[1]["t"] == "ok"


def test_a_tar_holds_files_and_directories_and_no_links(link: Link, agent: Agent) -> None:
    put(link, "d/a.txt", b"abc")
    (agent.data / "d" / "link").symlink_to("/etc/passwd")
    content, end = fetch(link, "tar", "")
    assert end["t"] == "ok"
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == ["d", "d/a.txt"]
        member = archive.extractfile("d/a.txt")
        assert member is not None
        assert member.read() == b"abc"


def test_a_file_over_the_limit_is_refused(link: Link) -> None:
    put(link, "a", b"x" * 1000)
    assert fetch(link, "get", "a", limit=999)[1]["code"] == "too_large"
    assert fetch(link, "tar", "", limit=999)[1]["code"] == "too_large"


def test_a_directory_is_removed_with_what_is_in_it_but_not_what_it_links_to(link: Link, agent: Agent) -> None:
    put(link, "d/e/a", b"1")
    put(link, "keep", b"1")
    (agent.data / "d" / "link").symlink_to(agent.data / "keep")
    assert link.ask("files", op="remove", path="d")["t"] == "ok"
    assert not (agent.data / "d").exists()
    assert (agent.data / "keep").exists()
    assert link.ask("files", op="remove", path="")["code"] == "bad_request"
    assert link.ask("files", op="remove", path="none")["code"] == "not_found"


def test_a_slow_reader_of_a_large_file_delays_nobody(link: Link, agent: Agent) -> None:
    (agent.data / "big").write_bytes(bytes(20 << 20))
    slow = agent.claimed()
    ident = slow.send("files", op="get", path="big", limit=1 << 30)
    assert link.run("1+1")["value"] == "2"
    size = 0
    while (frame := slow.until("data", "ok", "error", ident=ident))["t"] == "data":
        size += len(base64.b64decode(frame["piece"]))
    assert (frame["t"], size) == ("ok", 20 << 20)


def test_what_the_file_system_refuses_is_the_caller_s_to_mend_and_no_fault_of_the_agent(link: Link) -> None:
    put(link, "d/inside", b"x")
    for answer in (put(link, "n" * 300, b"x", upload="u2"), put(link, "d", b"x", upload="u3")):
        assert (answer["t"], answer["code"]) == ("error", "bad_request"), answer
    _, answer = fetch(link, "get", "n" * 300)
    assert answer["code"] in ("bad_request", "not_found")
