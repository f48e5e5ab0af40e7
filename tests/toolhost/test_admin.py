"""The operators' HTTP API over the real manager: what it shows, what it ends, and whom it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandboxes.spec import Ending, Retention
from tests.support.waiting import until
from tests.toolhost.managed import ManagedHost, digest_of, managed, tokens_file
from toolhost.admin import BASE
from toolhost.auth import Scope

SECRET = "Zq3xK9vT7mW1pR5nL8cY2bH6"


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[ManagedHost]:
    async with managed(tmp_path) as running:
        yield running


async def listed(host: ManagedHost, query: str = "") -> dict[str, dict[str, Any]]:
    found = await host.json(f"{BASE}{query}")
    return {session["name"]: session for session in found["sessions"]}


async def close_many(host: ManagedHost, **which: Any) -> list[str]:
    answer = await host.json(f"{BASE}/close", "POST", json.dumps(which).encode())
    return sorted(one["name"] for one in answer["would_close" if which.get("dry_run") else "closed"])


async def test_the_list_shows_state_use_and_the_last_call_and_no_secret(host: ManagedHost) -> None:
    await host.run("a", "1")
    await host.run("a", "1 / 0", attempt="mine")
    await host.run(SECRET, retention=Retention.RETAINED)
    answer = await host.ask(BASE)
    assert SECRET not in answer.body.decode()
    found = await listed(host)
    one = found["anonymous/request/a"]
    assert (one["phase"], one["attached"], one["calls"], one["epoch"]) == ("idle", 2, 2, 1)
    assert one["usage"]["memory_bytes"] == 1 << 20
    assert one["last_call"]["attempt_id"] == "mine"
    assert one["last_call"]["receipt"]["ending"] == "raised"
    assert 0 <= one["idle_s"] <= one["age_s"]
    retained = next(session for name, session in found.items() if name.startswith("anonymous/retained/#"))
    assert retained["id"] is None
    assert retained["session"] == digest_of(SECRET, retention=Retention.RETAINED)


async def test_the_list_is_filtered_by_principal_state_kind_id_and_idle_time(host: ManagedHost) -> None:
    await host.run("a")
    await host.run("b", principal="bob")
    await host.manager.close_session((await host.manager.find(digest_of("a")))[0])
    assert set(await listed(host)) == {"bob/request/b"}
    assert set(await listed(host, "?closed=1")) == {"anonymous/request/a", "bob/request/b"}
    assert set(await listed(host, "?principal=anonymous&closed=1")) == {"anonymous/request/a"}
    assert set(await listed(host, "?phase=idle,running")) == {"bob/request/b"}
    assert set(await listed(host, "?phase=running")) == set()
    assert set(await listed(host, "?kind=retained")) == set()
    assert set(await listed(host, "?id=b")) == {"bob/request/b"}
    assert set(await listed(host, "?idle_s=3600")) == set()
    await host.run("c")
    assert set(await listed(host, "?limit=1")) == {"anonymous/request/c"}, "the newest"
    assert set(await listed(host, "?limit=1&id=b")) == {"bob/request/b"}


@pytest.mark.parametrize(
    "query", ["?principle=bob", "?phase=sleepy", "?kind=x", "?idle_s=-1", "?idle_s=soon", "?limit=0", "?closed=maybe"]
)
async def test_a_mistyped_filter_is_refused_and_never_matches_everything(host: ManagedHost, query: str) -> None:
    answer = await host.ask(f"{BASE}{query}")
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "refused"


async def test_one_session_is_closed_by_the_beginning_of_its_digest(host: ManagedHost) -> None:
    await host.run("a")
    digest = digest_of("a")
    assert await host.json(f"{BASE}/{digest[:8]}", "DELETE") == {"closed": True}
    assert host.engine.sandboxes == {}
    shown = await host.json(f"{BASE}/{digest}")
    assert (shown["phase"], shown["close_reason"]) == ("closed", "operator")
    assert await host.json(f"{BASE}/{digest}", "DELETE") == {"closed": False}


async def test_many_are_closed_only_when_it_is_said_which(host: ManagedHost) -> None:
    for name, principal in (("a", "alice"), ("b", "bob"), ("c", "bob")):
        await host.run(name, principal=principal)
    for body in (b"", b"{}", b'{"dry_run": true}', b'{"all": false}'):
        assert (await host.ask(f"{BASE}/close", "POST", body)).status == 400
    assert await close_many(host, principal="bob", dry_run=True) == ["bob/request/b", "bob/request/c"]
    assert len(host.engine.sandboxes) == 3
    assert await close_many(host, idle_s=3600) == []
    assert await close_many(host, principal="bob") == ["bob/request/b", "bob/request/c"]
    assert len(host.engine.sandboxes) == 1
    assert await close_many(host, all=True) == ["alice/request/a"]


async def test_a_running_session_is_not_idle_however_old(host: ManagedHost) -> None:
    running = asyncio.create_task(host.run("a", "while True: pass"))
    await until_running(host, "a")
    assert await close_many(host, idle_s=1e-6) == []
    assert await close_many(host, all=True) == ["anonymous/request/a"]
    assert (await running).receipt.ending is Ending.KILLED


async def until_running(host: ManagedHost, ident: str) -> None:
    async def running() -> bool:
        return bool(await listed(host, f"?id={ident}&phase=running"))

    await until(running, "it never ran")


async def test_what_runs_is_interrupted_and_keeps_its_variables(host: ManagedHost) -> None:
    await host.run("a", "x = 5")
    running = asyncio.create_task(host.run("a", "while True: pass"))
    await until_running(host, "a")
    assert await host.json(f"{BASE}/{digest_of('a')}/interrupt", "POST") == {"interrupted": True}
    receipt = (await running).receipt
    assert (receipt.ending, receipt.state) == (Ending.INTERRUPTED, "kept")
    assert (await host.run("a", "x")).value == "5"
    assert await host.json(f"{BASE}/{digest_of('a')}/interrupt", "POST") == {"interrupted": False}


async def test_a_restart_gives_the_next_epoch_and_the_model_is_told(host: ManagedHost) -> None:
    await host.run("a", "x = 5")
    assert await host.json(f"{BASE}/{digest_of('a')}/restart", "POST") == {"epoch": 2}
    outcome = await host.run("a", "x")
    assert "NameError" in (outcome.error or "")
    assert "operator restarted" in (outcome.state_lost_before or "")


async def test_receipts_are_listed_newest_first_without_code_or_output(host: ManagedHost) -> None:
    await host.run("a", "print('XYZZY')", attempt="first")
    await host.run("a", "1", attempt="second")
    answer = await host.ask(f"{BASE}/{digest_of('a')}/attempts")
    assert "XYZZY" not in answer.body.decode()
    assert [one["attempt_id"] for one in answer.json()["attempts"]] == ["second", "first"]
    assert len((await host.json(f"{BASE}/{digest_of('a')}/attempts?limit=1"))["attempts"]) == 1


async def test_a_minted_key_is_shown_once_and_opens_the_session_it_names(host: ManagedHost) -> None:
    minted = await host.json(BASE, "POST", b'{"principal": "alice", "ttl_s": 60}')
    assert (minted["principal"], len(minted["key"]) >= 22) == ("alice", True)
    shown = await host.json(f"{BASE}/{minted['session']}")
    assert (shown["phase"], shown["retention"], shown["ttl_s"], shown["id"]) == ("new", "retained", 60.0, None)
    assert host.engine.sandboxes == {}


@pytest.mark.parametrize(
    "body",
    [
        b'{"principal": "a/b"}',
        b'{"ttl_s": 0}',
        b'{"ttl": 5}',
        b"[]",
        b"{",
        b'{"ttl_s": true}',
        b'{"ttl_s": 1' + b"0" * 400 + b"}",
        b'{"principal": "\\ud800"}',
        b"[" * 60_000,
    ],
)
async def test_a_mint_that_makes_no_sense_is_refused(host: ManagedHost, body: bytes) -> None:
    assert (await host.ask(BASE, "POST", body)).status == 400


async def test_a_later_ttl_narrows_and_never_widens(host: ManagedHost) -> None:
    key = SECRET
    for sent, expected in ((None, None), ("600", 600.0), ("60", 60.0), ("900", 60.0), (None, 60.0)):
        headers = [("x-toolhost-session", key), *([("x-toolhost-ttl", sent)] if sent else [])]
        async with await host.connect(None, headers=headers) as stream:
            await stream.python("1")
        shown = await host.json(f"{BASE}/{digest_of(key, retention=Retention.RETAINED)}")
        assert shown["ttl_s"] == expected


@pytest.mark.parametrize(("name", "status"), [("abc", 400), ("ABCDEF", 400), ("..%2f..", 400), ("0123456789", 404)])
async def test_a_session_that_is_not_there_is_told_apart_from_a_name_that_is_none(
    host: ManagedHost, name: str, status: int
) -> None:
    assert (await host.ask(f"{BASE}/{name}")).status in {status, 404}


async def test_with_a_ledger_that_cannot_be_written_sessions_are_still_closed(host: ManagedHost) -> None:
    from sandboxes.errors import StoreUnavailable

    await host.run("a")

    async def full(*_arguments: Any, **_named: Any) -> Any:
        raise StoreUnavailable("the disk is full")

    host.manager._store.put = full  # type: ignore[method-assign]
    assert await host.json(f"{BASE}/{digest_of('a')}", "DELETE") == {"closed": True}
    assert host.engine.sandboxes == {}


# --- whom it refuses -------------------------------------------------------------------------------------------------

ROUTES = [
    ("GET", ""),
    ("POST", ""),
    ("POST", "/close"),
    *((method, f"/{{digest}}{path}") for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/interrupt"))),
    *(
        (method, f"/{{digest}}{path}")
        for method, path in (("POST", "/restart"), ("GET", "/attempts"), ("GET", "/files"))
    ),
    *((method, "/{digest}/files/x") for method in ("GET", "PUT", "DELETE")),
    ("GET", "/{digest}/archive"),
]


async def test_every_route_needs_the_admin_scope(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path / "tokens", alice=(Scope.USE,), root=(Scope.USE, Scope.ADMIN))
    async with managed(tmp_path, tokens=tokens) as host:
        await host.run("a", "x = 1", principal="alice")
        digest = digest_of("a", "alice")
        for method, path in ROUTES:
            place = f"{BASE}{path.format(digest=digest)}"
            assert (await host.ask(place, method, who="alice")).status == 403, (method, path)
            assert (await host.ask(place, method)).status == 401, (method, path)
        assert (await host.run("a", "x", principal="alice")).value == "1"
        assert (await host.ask(BASE, who="root")).status == 200


async def test_without_tokens_it_is_not_served_beyond_this_machine(tmp_path: Path) -> None:
    async with managed(tmp_path, server={"listen": "0.0.0.0:0"}, auth={"insecure": True}) as host:
        await host.run("a")
        for method, path in ROUTES:
            answer = await host.ask(f"{BASE}{path.format(digest=digest_of('a'))}", method)
            assert answer.status == 403, (method, path)
        assert "--tokens-file" in answer.json()["error"]["message"]
        assert len(host.engine.sandboxes) == 1
