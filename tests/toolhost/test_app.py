"""What is not MCP: health, liveness, attempts; and what nothing is served at."""

from __future__ import annotations

from typing import Any

import pytest

from sandboxes.errors import (
    AttemptExpired,
    BackendError,
    CallRefused,
    EngineUnavailable,
    EnvironmentMissing,
    NoCapacity,
    StoreUnavailable,
)
from tests.toolhost.conftest import Host, StartHost
from tests.toolhost.rawclient import request
from toolhost.auth import Scope, mint
from toolhost.errors import HIDDEN, text_for


async def test_the_deep_check_asks_the_sandboxes_and_tells_what_is_wrong(host: Host) -> None:
    answer = await request(host.port, "/healthz")
    assert (answer.status, answer.json()["status"]) == (200, "healthy")
    assert host.manager.events.count("health") == 1
    host.manager.unhealthy = NoCapacity("no room", retry_after_s=3)
    answer = await request(host.port, "/healthz")
    assert answer.status == 503
    assert answer.json()["error"] == {"code": "no_capacity", "message": "no room; retry in 3 s"}
    assert answer.header("retry-after") == "3"


async def test_no_answer_names_a_place_of_the_machine(host: Host) -> None:
    for error in (
        StoreUnavailable("the disk of /var/lib/th/ledger.db is full or failing: free space in /var/lib/th (disk full)"),
        EnvironmentMissing("there is no sandbox environment in /var/lib/th/environment: run: toolhost setup"),
        EngineUnavailable("no Docker engine answers at unix:///var/lib/docker.sock: Connection refused"),
        BackendError("bwrap: Can't bind mount '/oldroot/var/lib/th/x' on /newroot/mnt/data/x: No such file"),
    ):
        host.manager.unhealthy = error
        answer = (await request(host.port, "/healthz")).json()["error"]["message"]
        for text in (answer, text_for(error)):
            assert "var/lib" not in text and HIDDEN in text
    assert text_for(CallRefused("/etc/passwd is not in /mnt/data")) == "Error: /etc/passwd is not in /mnt/data."
    assert text_for(BackendError("/mnt/data/x and 1/2 or and/or https://e.example/a are none")).startswith(
        "Error: /mnt/data/x and 1/2 or and/or https://e.example/a are none"
    )


async def test_liveness_asks_nobody(host: Host) -> None:
    host.manager.unhealthy = EngineUnavailable("gone")
    answer = await request(host.port, "/livez")
    assert (answer.status, answer.json()["status"]) == (200, "alive")


@pytest.mark.parametrize(("kind", "header"), [("request/", "x-session-id"), ("", "x-session-id")])
async def test_a_finished_attempt_is_collected_by_its_session_and_id(host: Host, kind: str, header: str) -> None:
    async with await host.connect(headers=[(header, "a:b.c")]) as stream:
        await stream.python("print('kept')", meta={"toolhost/attempt-id": "mine 1"})
    answer = await request(host.port, f"/v1/sessions/{kind}a:b.c/attempts/mine%201")
    assert answer.status == 200
    assert answer.json()["text"] == "kept\n"
    assert answer.json()["receipt"]["attempt_id"] == "mine 1"


async def test_a_retained_session_s_attempt_needs_its_kind(host: Host) -> None:
    async with await host.connect(headers=[("x-toolhost-session", "k")]) as stream:
        await stream.python("1", meta={"toolhost/attempt-id": "mine"})
    assert (await request(host.port, "/v1/sessions/retained/k/attempts/mine")).status == 200
    assert (await request(host.port, "/v1/sessions/k/attempts/mine")).status == 404


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/sessions/a/attempts/none", 404, "attempt_unknown"),
        ("/v1/sessions/nothing/a/attempts/x", 404, "refused"),
        ("/v1/sessions/a%20b/attempts/x", 400, "refused"),
        ("/nowhere", 404, "http"),
        ("/s/x", 404, "http"),
        ("/", 404, "http"),
    ],
)
async def test_what_is_not_there_is_told_in_json(host: Host, path: str, status: int, code: str) -> None:
    answer = await request(host.port, path)
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/models", "/v1/responses/resp_1"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_request_that_was_meant_for_the_model_server_is_told_so(host: Host, path: str, method: str) -> None:
    answer = await request(host.port, path, method=method)
    assert answer.status == 404
    assert "--port 8001" in answer.json()["error"]["message"]


async def test_an_expired_attempt_is_gone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    async def expired(*_arguments: object) -> Any:
        raise AttemptExpired("its result is no longer kept")

    monkeypatch.setattr(host.manager, "collect", expired)
    assert (await request(host.port, "/v1/sessions/a/attempts/x")).status == 410


async def test_attempts_of_another_principal_are_unknown(start_host: StartHost, tmp_path: Any) -> None:
    tokens = dict(mint(name, [Scope.USE]) for name in ("alice", "bob"))
    file = tmp_path / "tokens"
    file.write_text("\n".join(tokens.values()))
    host = await start_host(auth={"tokens_file": str(file)})
    alice, bob = ([("Authorization", f"Bearer {token}")] for token in tokens)
    async with await host.connect(headers=[*alice, ("x-session-id", "s")]) as stream:
        await stream.python("1", meta={"toolhost/attempt-id": "mine"})
    path = "/v1/sessions/s/attempts/mine"
    assert (await request(host.port, path, headers=alice)).status == 200
    assert (await request(host.port, path, headers=bob)).status == 404
    assert (await request(host.port, path)).status == 401


@pytest.mark.parametrize("path", ["/x/y/livez", "/livez"])
async def test_a_proxy_s_prefix_is_taken_off_where_the_proxy_did_not(start_host: StartHost, path: str) -> None:
    host = await start_host(server={"root_path": "/x/y"})
    assert (await request(host.port, path)).status == 200


async def test_other_methods_are_refused(host: Host) -> None:
    assert (await request(host.port, "/livez", method="POST")).status == 405
    assert (await request(host.port, "/messages/00")).status == 405
