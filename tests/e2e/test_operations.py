"""Operators' work on a host as they have it: orphans, tenants, fair shares, files, faults from outside."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.operating import (
    BACKENDS,
    admin,
    connect,
    counts,
    operated,
    prune,
    python,
    remove_from_outside,
    running_sandboxes,
    toolhost,
)
from tests.support.waiting import until
from tests.toolhost import rawclient
from tests.toolhost.managed import tokens_file
from toolhost.auth import Scope

pytestmark = pytest.mark.timeout(600)

CAP = 20
CLIENTS = 200
OWN_S = 5  # the time that a call asks for its code
KEPT = {"x-toolhost-session": "kept-by-the-test-000001"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


# --- orphans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_prune_with_the_host_dead_removes_exactly_the_orphans(tmp_path: Path, backend: str) -> None:
    with operated(tmp_path, backend, "--pool", "1") as host:
        await asyncio.to_thread(host.start)
        await python(host, KEPT, "x = 'kept'")
        await python(host, {"x-session-id": "chosen"}, "x = 'chosen'")
        nameless = await connect(host, {})
        await nameless.python("x = 1")

        async def full() -> bool:
            return (await counts(host))["pool"] == 1

        await until(full, "the pool was never filled again")
        refused = await asyncio.to_thread(prune, host)
        assert (refused.returncode, "a host runs" in refused.stderr) == (4, True)
        assert len(running_sandboxes(host)) == 4

        await asyncio.to_thread(host.kill)
        nameless.close()
        shown = await asyncio.to_thread(prune, host, "--dry-run", "--json")
        verdicts = {(one["session"] or "").split("/#")[0]: one["verdict"] for one in json.loads(shown.stdout)}
        assert verdicts.pop("anonymous/request/chosen") == "held"
        assert verdicts.pop("anonymous/retained") == "held"
        assert sorted(verdicts.values()) == ["orphan", "orphan"], "the pooled one, and the nameless connection's"
        assert len(running_sandboxes(host)) == 4

        done = await asyncio.to_thread(prune, host)
        assert done.returncode == 0, done.stderr
        assert "2 are left alone" in done.stderr
        assert len(running_sandboxes(host)) == 2
        refused = await asyncio.to_thread(prune, host, "--all")
        assert (refused.returncode, "--yes" in refused.stderr) == (2, True)

        await asyncio.to_thread(host.start)
        assert await python(host, KEPT, "x") == "'kept'"
        assert await python(host, {"x-session-id": "chosen"}, "x") == "'chosen'"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_prune_needs_neither_environment_nor_image_and_finds_files_that_nobody_has(
    tmp_path: Path, backend: str
) -> None:
    with operated(tmp_path, backend) as host:
        await asyncio.to_thread(host.start)
        nameless = await connect(host, {})
        await nameless.python("open('f', 'w').write('1')")
        await asyncio.to_thread(host.kill)
        nameless.close()
        workspaces = host.state_dir / backend / "workspaces"
        (left,) = workspaces.iterdir()
        shutil.copytree(left, workspaces / "s-nobodys")
        host.environment["TOOLHOST_BUBBLEWRAP__ENVIRONMENT_DIR"] = str(tmp_path / "no environment")
        host.environment["TOOLHOST_DOCKER__IMAGE"] = "no-such-image:none"
        shown = json.loads((await asyncio.to_thread(prune, host, "--dry-run", "--json")).stdout)
        assert sorted((one["sandbox"] is None, one["verdict"]) for one in shown) == [
            (False, "orphan"),
            (True, "orphan"),
        ]
        done = await asyncio.to_thread(prune, host)
        assert (done.returncode, "removed 2 of 2" in done.stderr) == (0, True), done.stderr
        assert list(workspaces.iterdir()) == []
        assert running_sandboxes(host) == []


@pytest.mark.bubblewrap
async def test_without_its_ledger_nothing_counts_as_an_orphan(tmp_path: Path) -> None:
    with operated(tmp_path, "bubblewrap") as host:
        await asyncio.to_thread(host.start)
        await python(host, KEPT, "x = 1")
        await asyncio.to_thread(host.kill)
        for file in host.state_dir.glob("ledger.sqlite*"):
            file.write_bytes(b"not a ledger")
        done = await asyncio.to_thread(prune, host)
        assert done.returncode == 0
        assert "unknown" in done.stdout
        assert len(running_sandboxes(host)) == 1
        done = await asyncio.to_thread(prune, host, "--all", "--yes")
        assert (done.returncode, running_sandboxes(host)) == (0, [])


def test_where_no_host_was_there_is_nothing_to_prune(tmp_path: Path) -> None:
    done = toolhost("sessions", "prune", "--state-dir", str(tmp_path / "none"))
    assert (done.returncode, "nothing to prune" in done.stderr) == (0, True)
    assert not (tmp_path / "none").exists()


# --- tenants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_two_principals_with_one_id_share_nothing(tmp_path: Path, backend: str) -> None:
    tokens = tokens_file(tmp_path / "tokens", alice=(Scope.USE,), bob=(Scope.USE,), root=(Scope.ADMIN,))
    alice, bob, root = (bearer(tokens[name]) for name in ("alice", "bob", "root"))
    same = {"x-session-id": "same"}
    with operated(tmp_path, backend, "--tokens-file", str(tmp_path / "tokens")) as host:
        await asyncio.to_thread(host.start)
        await python(host, {**alice, **same}, "x = 'alice'; open('secret.txt', 'w').write('of alice')")
        assert "NameError" in await python(host, {**bob, **same}, "x")
        assert "secret" not in await python(host, {**bob, **same}, "import os; os.listdir('/mnt/data')")
        assert len(running_sandboxes(host)) == 2

        path = "/v1/sessions/same/files/secret.txt"
        assert (await asyncio.to_thread(lambda: host.get(path, headers=alice))) == (200, b"of alice")
        assert (await asyncio.to_thread(lambda: host.get(path, headers=bob)))[0] == 404
        assert (await asyncio.to_thread(lambda: host.get("/v1/admin/sessions", headers=bob)))[0] == 403
        listed = await admin(host, **root)
        assert {one["name"] for one in listed["sessions"]} == {"alice/request/same", "bob/request/same"}

        env = {"TOOLHOST_CLIENT__URL": host.url, "TOOLHOST_CLIENT__TOKEN": tokens["root"]}
        done = await asyncio.to_thread(lambda: toolhost("sessions", "close", "--principal", "bob", "--yes", env=env))
        assert (done.returncode, done.stdout.strip()) == (0, "bob/request/same"), done.stderr
        assert (await python(host, {**alice, **same}, "x")).startswith("'alice'")
        for token in tokens.values():
            assert token not in host.log_text()
            assert not any(token in " ".join(line) for line in _command_lines())


def _command_lines() -> list[list[str]]:
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


# --- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_200_clients_of_two_principals_share_20_places_fairly_and_the_one_too_many_is_told_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(rawclient, "PATIENCE_S", 120.0)
    tokens = tokens_file(tmp_path / "tokens", greedy=(Scope.USE,), modest=(Scope.USE,), root=(Scope.ADMIN,))
    limits = {"TOOLHOST_LIFECYCLE__MAX_QUEUE": str(CLIENTS - CAP), "TOOLHOST_LIFECYCLE__QUEUE_S": "120"}
    arguments = ("--tokens-file", str(tmp_path / "tokens"), "--max-sessions", str(CAP))
    root, done = bearer(tokens["root"]), list[str]()
    with operated(tmp_path, backend, *arguments, **limits) as host:
        await asyncio.to_thread(host.start)

        async def holder(number: int) -> None:
            async with await connect(host, {**bearer(tokens["greedy"]), "x-session-id": f"held-{number}"}) as stream:
                await stream.send(
                    "tools/call", {"name": "python", "arguments": {"code": "import time; time.sleep(600)"}}
                )
                await stream.message()

        async def client(principal: str, number: int) -> None:
            headers = {**bearer(tokens[principal]), "x-session-id": f"resp_{number:x}"}
            async with await connect(host, headers) as stream:
                ident = await stream.send(
                    "tools/call",
                    {"name": "python", "arguments": {"code": "6 * 7"}, "_meta": {"toolhost/timeout": OWN_S}},
                )
                message = await stream.message()
                assert message["id"] == ident
                # It waited for longer than its code's own time, to which that was not charged.
                assert message["result"]["content"][0]["text"] == "42"
                done.append(principal)
                await stream.tool("cleanup_session")

        async def reaches(name: str, number: int) -> None:
            async def reached() -> bool:
                return (await counts(host, **root))[name] == number

            await until(reached, f"there were never {number} {name}", 60)

        async with asyncio.TaskGroup() as group:
            holders = [group.create_task(holder(number)) for number in range(CAP)]
            await reaches("running", CAP)
            waiting = (CLIENTS - CAP) // 2
            for principal in ("greedy", "modest"):  # all of the greedy ones come first
                for number in range(waiting):
                    group.create_task(client(principal, number))
                await reaches("waiting", waiting * (1 + (principal == "modest")))
            async with await connect(host, {**bearer(tokens["modest"]), "x-session-id": "too-many"}) as stream:
                text = await stream.python("1")
                assert text.startswith("Error: at capacity")
                assert "Retry in " in text
            await asyncio.sleep(OWN_S + 1)  # whoever charged the queue to the code would end all of them
            await admin(host, "/close", "POST", {"phase": "running"}, **root)
            await asyncio.wait(holders)
        await reaches("held", 0)
    assert len(done) == CLIENTS - CAP
    first = done[: len(done) // 2]  # while both have clients that wait
    shares = sorted((first.count("greedy"), first.count("modest")))
    assert shares[1] <= 2 * shares[0], shares


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_files_and_archives_follow_no_link_out_of_the_sandbox(tmp_path: Path, backend: str) -> None:
    with operated(tmp_path, backend) as host:
        await asyncio.to_thread(host.start)
        content = os.urandom(1_500_000)
        put = await asyncio.to_thread(lambda: host.request("PUT", "/v1/sessions/a/files/d/big.bin", body=content))
        assert put[0] == 201
        code = "import os; os.symlink('/etc/passwd', 'd/link'); os.symlink('/', 'root'); os.mkfifo('d/pipe')"
        code += "; len(open('d/big.bin', 'rb').read())"
        assert (await python(host, {"x-session-id": "a"}, code)).startswith(str(len(content)))
        for path in ("d/link", "root/etc/passwd", "d/pipe", "../../etc/passwd", "/etc/passwd"):
            status, body = await asyncio.to_thread(host.get, f"/v1/sessions/a/files/{path}", timeout=20)
            assert status in (400, 404), (path, status, body[:100])
        status, body = await asyncio.to_thread(host.get, "/v1/sessions/a/archive?path=d")
        assert status == 200
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            members = {member.name: member for member in archive}
            assert set(members) == {"big.bin"}
            file = archive.extractfile("big.bin")
            assert file is not None
            assert file.read() == content


# --- looking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_session_is_shown_with_the_name_that_its_sandbox_has_on_the_machine(
    tmp_path: Path, backend: str
) -> None:
    with operated(tmp_path, backend) as host:
        await asyncio.to_thread(host.start)
        await python(host, {"x-session-id": "a"}, "1")
        (running,) = running_sandboxes(host)
        shown = await asyncio.to_thread(
            lambda: toolhost("sessions", "show", "a", env={"TOOLHOST_CLIENT__URL": host.url})
        )
        name = dict(line.split("\t") for line in shown.stdout.splitlines())["sandbox"]
        known = f"bubblewrap pid {running}" if backend == "bubblewrap" else f"docker {_container_name(running)}"
        assert name == known


def _container_name(container: str) -> str:
    command = ["docker", "inspect", "--format", "{{.Name}}", container]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip().lstrip("/")


# --- faults from outside ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_sandbox_removed_from_outside_is_told_and_replaced(tmp_path: Path, backend: str) -> None:
    with operated(tmp_path, backend) as host:
        await asyncio.to_thread(host.start)
        async with await connect(host, KEPT) as stream:
            await stream.python("x = 1; open('file', 'w').write('kept')")
            (sandbox,) = running_sandboxes(host)
            call = {"name": "python", "arguments": {"code": "print('began', flush=True)\nwhile True: pass"}}
            await stream.send("tools/call", {**call, "_meta": {"toolhost/attempt-id": "cut"}})

            async def runs() -> bool:
                return (await counts(host))["running"] == 1

            await until(runs, "it never ran")
            await asyncio.to_thread(remove_from_outside, host, sandbox)
            text = (await stream.message())["result"]["content"][0]["text"]
            assert "sandbox" in text
            assert "lost" in text
            assert "NameError" in await stream.python("x")
            assert await stream.python("open('file').read()") == "'kept'"
        # The same between calls: nobody waits, and the next call begins anew.
        (sandbox,) = running_sandboxes(host)
        await asyncio.to_thread(remove_from_outside, host, sandbox)
        assert "'kept'" in await python(host, KEPT, "open('file').read()")
        assert len(running_sandboxes(host)) == 1
        receipts = await admin(host, f"/{(await admin(host))['sessions'][0]['session']}/attempts")
        assert {one["attempt_id"]: one for one in receipts["attempts"]}["cut"]["receipt"]["ending"] == "lost"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own to fill needs root")
async def test_a_full_disk_fails_calls_with_its_name_and_loses_no_variables(tmp_path: Path, backend: str) -> None:
    with _small_disk(tmp_path / "disk") as disk, operated(disk, backend) as host:
        await asyncio.to_thread(host.start)
        await python(host, KEPT, "x = 41")
        filler = disk / "filler"
        _fill(filler)
        kept = await python(host, KEPT, "x + 1")
        assert kept == "42", "a session that runs goes on"
        attempt = await python(host, KEPT, "x + 2", attempt="needs-the-ledger")
        new = await python(host, {"x-session-id": "new"}, "1")
        for text in (attempt, new):
            assert text.startswith("Error: "), text
            assert "full" in text or "No space" in text, text
        filler.unlink()
        assert await python(host, KEPT, "x + 2", attempt="needs-the-ledger") == "43"
        assert await python(host, {"x-session-id": "new"}, "1") == "1"
        assert len(running_sandboxes(host)) == 2
        await asyncio.to_thread(host.restart)
        assert await python(host, KEPT, "x") == "41"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own to fill needs root")
async def test_with_a_full_disk_a_start_says_so_and_loses_nothing_and_prune_makes_room(
    tmp_path: Path, backend: str
) -> None:
    with _small_disk(tmp_path / "disk") as disk, operated(disk, backend) as host:
        await asyncio.to_thread(host.start)
        await python(host, KEPT, "x = 41")
        nameless = await connect(host, {})
        await nameless.python("open('f', 'wb').write(bytes(4 << 20))")
        await asyncio.to_thread(host.kill)
        nameless.close()
        _fill(disk / "filler")
        before = sorted(path.name for path in (host.state_dir / backend).iterdir())
        await asyncio.to_thread(host.spawn)
        assert host.process is not None
        assert await asyncio.to_thread(host.process.wait, 60) == 2
        assert "full" in host.log_text().splitlines()[-1]
        assert sorted(path.name for path in (host.state_dir / backend).iterdir()) == before, "half of something is left"
        assert len(running_sandboxes(host)) == 2

        done = await asyncio.to_thread(prune, host)
        assert "removed 1 of 1" in done.stderr, done.stderr
        assert len(running_sandboxes(host)) == 1
        await asyncio.to_thread(host.start)
        assert await python(host, KEPT, "x + 1") == "42", "there is room again"


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        piece = b"\0" * (1 << 16)
        while piece:
            try:
                file.write(piece)
            except OSError:
                piece = piece[: len(piece) // 2]


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0755", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
