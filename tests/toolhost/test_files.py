"""The users' HTTP API over the real manager: their own sessions and files, nobody else's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes.spec import Retention
from tests.support.waiting import until
from tests.toolhost.managed import ManagedHost, digest_of, managed, tokens_file
from tests.toolhost.rawclient import request
from toolhost.auth import Scope

SECRET = "Zq3xK9vT7mW1pR5nL8cY2bH6"


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[ManagedHost]:
    async with managed(tmp_path, server={"max_file_bytes": 1_000_000}) as running:
        yield running


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[ManagedHost]:
    """A host that others can reach, with two users."""
    tokens = tokens_file(tmp_path / "tokens", alice=(Scope.USE,), bob=(Scope.USE,))
    async with managed(tmp_path, tokens=tokens, server={"listen": "0.0.0.0:0"}) as running:
        yield running


@pytest.mark.parametrize("base", ["/v1/sessions/a", "/v1/sessions/request/a", f"/v1/sessions/retained/{SECRET}"])
async def test_a_file_goes_up_is_listed_comes_down_and_is_removed(host: ManagedHost, base: str) -> None:
    content = bytes(range(256)) * 3000  # more than one piece
    answer = await host.ask(f"{base}/files/dir/na%20me.bin", "PUT", content)
    assert (answer.status, answer.json()["size"]) == (201, len(content))
    listed = (await host.json(f"{base}/files"))["files"]
    assert [(one["path"], one["size"]) for one in listed] == [("dir/na me.bin", len(content))]
    down = await host.ask(f"{base}/files/dir/na%20me.bin")
    assert down.body == content
    assert down.header("content-disposition") == "attachment; filename*=UTF-8''na%20me.bin"
    assert down.header("x-content-type-options") == "nosniff"
    assert (await host.ask(f"{base}/files/dir/na%20me.bin", "DELETE")).status == 204
    gone = await host.ask(f"{base}/files/dir/na%20me.bin")
    assert (gone.status, gone.json()["error"]["code"]) == (404, "file_unknown")
    assert host.engine.most == 1


async def test_a_list_that_is_cut_says_so(host: ManagedHost) -> None:
    await host.ask("/v1/sessions/a/files/0", "PUT")
    (files,) = host.engine.workspaces.values()
    assert (await host.json("/v1/sessions/a/files"))["complete"] is True
    files.update({f"many/{number:04}": b"" for number in range(5000)})
    answer = await host.json("/v1/sessions/a/files")
    assert (len(answer["files"]), answer["complete"]) == (5000, False)


async def test_an_empty_file_is_a_file(host: ManagedHost) -> None:
    assert (await host.ask("/v1/sessions/a/files/empty", "PUT")).json()["size"] == 0
    answer = await host.ask("/v1/sessions/a/files/empty")
    assert (answer.status, answer.body) == (200, b"")


async def test_reading_makes_no_session(host: ManagedHost) -> None:
    for path in ("/files", "/files/x", "/archive", "", "/attempts/x"):
        answer = await host.ask(f"/v1/sessions/none{path}")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "session_unknown"), path
    assert host.engine.most == 0


async def test_a_file_over_the_limit_is_refused_by_its_announced_or_its_real_size(host: ManagedHost) -> None:
    answer = await host.ask("/v1/sessions/a/files/big", "PUT", b"x" * 1_000_001)
    assert answer.status == 413
    assert "max_file_bytes" in answer.json()["error"]["message"]
    chunk = b"%x\r\n%b\r\n" % (300_000, b"y" * 300_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    head = f"PUT /v1/sessions/a/files/big HTTP/1.1\r\nHost: 127.0.0.1:{host.port}\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode() + chunk * 4)
    async with asyncio.timeout(10):
        assert b" 413 " in await reader.readline()
    writer.close()
    assert (await host.json("/v1/sessions/a/files"))["files"] == []


async def test_an_upload_whose_client_goes_changes_nothing_and_leaves_nothing(host: ManagedHost) -> None:
    await host.ask("/v1/sessions/a/files/kept", "PUT", b"old")
    _, writer = await asyncio.open_connection("127.0.0.1", host.port)
    head = f"PUT /v1/sessions/a/files/kept HTTP/1.1\r\nHost: 127.0.0.1:{host.port}\r\nContent-Length: 900000\r\n\r\n"
    writer.write(head.encode() + b"n" * 500_000)
    await writer.drain()

    def partly() -> bool:
        return any(len(found) > 1 for found in host.engine.workspaces.values())

    await until(partly, "nothing of it came")
    writer.close()
    await until(lambda: not partly(), "a part of it is left")
    assert (await host.ask("/v1/sessions/a/files/kept")).body == b"old"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/sessions/a%20b/files", 400),
        (f"/v1/sessions/{'x' * 129}/files", 400),
        ("/v1/sessions/nothing/a/files", 404),
        ("/v1/sessions/request/a/nothing", 404),
    ],
)
async def test_what_is_no_session_is_refused(host: ManagedHost, path: str, status: int) -> None:
    answer = await host.ask(path)
    assert answer.status == status
    assert answer.json()["error"]["message"]


async def test_a_user_lists_shows_and_closes_what_is_their_own_only(shared: ManagedHost) -> None:
    async with await shared.connect("same", "alice") as alice, await shared.connect("same", "bob") as bob:
        await alice.python("x = 'alice'")
        await bob.python("x = 'bob'")
        assert len(shared.engine.sandboxes) == 2, "one id of two principals is two sessions"
        assert (await alice.python("x"), await bob.python("x")) == ("'alice'", "'bob'")
        await shared.ask("/v1/sessions/same/files/secret", "PUT", b"of alice", "alice")
        listed = (await shared.json("/v1/sessions", who="bob"))["sessions"]
        assert [one["name"] for one in listed] == ["bob/request/same"]
        assert (await shared.json("/v1/sessions/same", who="bob"))["principal"] == "bob"
        assert (await shared.ask("/v1/sessions/same/files/secret", who="bob")).status == 404, "bob has no such file"
        assert (await shared.json("/v1/sessions/same", "DELETE", who="bob")) == {"closed": True}
        assert await alice.python("x") == "'alice'"
        assert (await shared.ask("/v1/sessions/same/files/secret", who="alice")).body == b"of alice"


async def test_another_s_session_does_not_exist_for_a_user(shared: ManagedHost) -> None:
    await shared.run("only-alice", "x = 1", principal="alice", attempt="mine")
    await shared.run(SECRET, "x = 1", principal="alice", retention=Retention.RETAINED)
    for base in ("/v1/sessions/only-alice", f"/v1/sessions/retained/{SECRET}"):
        for method, path in (("GET", ""), ("GET", "/files"), ("GET", "/files/x"), ("DELETE", "/files/x")):
            assert (await shared.ask(base + path, method, who="bob")).status == 404, (base, method, path)
        assert (await shared.ask(f"{base}/attempts/mine", who="bob")).status == 404
        assert (await shared.json(base, "DELETE", who="bob")) == {"closed": False}
    assert len(shared.engine.sandboxes) == 2


async def test_bobs_post_to_alices_connection_is_404_and_runs_nothing(shared: ManagedHost) -> None:
    async with await shared.connect("a", "alice") as stream:
        await stream.python("x = 1")
        call = {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {"name": "python"}}
        call["params"] = {"name": "python", "arguments": {"code": "x = 2"}}
        answer = await stream.post(json.dumps(call).encode(), shared.headers("bob"))
        assert answer.status == 404
        assert await stream.python("x") == "1"


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_a_guessable_retained_key_is_refused_beyond_this_machine(shared: ManagedHost, method: str) -> None:
    answer = await shared.ask("/v1/sessions/retained/mine/files/x", method, b"x", "alice")
    assert answer.status == 403
    assert "too easy to guess" in answer.json()["error"]["message"]
    async with await shared.connect(None, "alice", [("x-toolhost-session", "mine")]) as stream:
        assert "too easy to guess" in await stream.python("1")
    assert shared.engine.most == 0


async def test_a_minted_key_works_for_its_principal(shared: ManagedHost) -> None:
    minted = await shared.json("/v1/sessions", "POST", b'{"ttl_s": 60}', "alice")
    header = [("x-toolhost-session", minted["key"])]
    async with await shared.connect(None, "alice", header) as stream:
        assert await stream.python("40 + 2") == "42"
    async with await shared.connect(None, "bob", header) as stream:
        await stream.python("1")
    assert len(shared.engine.sandboxes) == 2, "a key of alice's opens nothing of hers for bob"


async def test_wrong_tokens_are_401_and_cost_nothing(shared: ManagedHost) -> None:
    wrong = [("Authorization", "Bearer th_wrong")]
    for path in ("/v1/sessions", "/v1/sessions/a/files/x", "/v1/admin/sessions", "/python/sse", "/metrics"):
        answer = await request(shared.port, path, headers=wrong)
        assert answer.status == 401, path
    assert (await request(shared.port, "/v1/sessions/a/files/x", method="PUT", body=b"x", headers=wrong)).status == 401
    assert shared.engine.calls["launch"] == 0
    assert await shared.manager.sessions() == []


async def test_where_everybody_is_the_same_nobody_can_list_sessions(tmp_path: Path) -> None:
    async with managed(tmp_path, server={"listen": "0.0.0.0:0"}, auth={"insecure": True}) as host:
        await host.run("a")
        assert (await host.ask("/v1/sessions")).status == 403
        assert (await host.ask("/v1/sessions/a")).json()["session"] == digest_of("a")


async def test_a_name_with_a_newline_is_a_name(host: ManagedHost) -> None:
    assert (await host.ask("/v1/sessions/a/files/a%0Ab", "PUT", b"x")).status == 201
    assert (await host.ask("/v1/sessions/a/files/a%0Ab")).body == b"x"
    assert (await host.ask("/v1/sessions/a/files/a%0Ab", "DELETE")).status == 204
