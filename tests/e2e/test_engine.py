"""The Docker engine under a host is restarted or stops answering: defined texts, no session wedged, nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.spec import KeyKind, SessionKey
from tests.e2e.operating import admin, counts, operated, python, running_sandboxes
from tests.support.engine import PrivateEngine, private_engine
from tests.support.host import RunningHost
from tests.support.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with private_engine() as started:
        yield started


@contextlib.contextmanager
def on(engine: PrivateEngine, directory: Path) -> Iterator[RunningHost]:
    with operated(directory, "docker", DOCKER_HOST=engine.url, TOOLHOST_DOCKER__IMAGE=engine.image) as host:
        yield host


def key(number: int) -> dict[str, str]:
    return {"x-toolhost-session": f"kept-by-the-test-{number:06d}"}


async def nothing_is_left(host: RunningHost) -> None:
    listed = (await admin(host))["sessions"]

    async def matched() -> bool:
        return len(running_sandboxes(host)) == sum(one["sandbox"] is not None for one in listed)

    await until(matched, "there are sandboxes without a session")
    await admin(host, "/close", "POST", {"all": True})
    await until(lambda: running_sandboxes(host) == [], "sandboxes were left")


WAITS = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nx + 100"


async def runs(host: RunningHost) -> None:
    """The call that was begun is running."""

    async def one() -> bool:
        return (await counts(host))["running"] == 1

    await until(one, "it never ran")


def digest(number: int) -> str:
    return SessionKey("anonymous", KeyKind.RETAINED, key(number)["x-toolhost-session"]).digest()


async def prepared(host: RunningHost) -> None:
    await asyncio.to_thread(host.start)
    for number in range(3):
        await python(host, key(number), f"x = {number}\nopen('kept', 'w').write('file {number}') and None")


DOWN = "Error: the Docker engine does not answer: No such file or directory. Nothing ran. Trying again later may work."
LOST = "variables are lost, files are kept"


async def test_variables_survive_a_restart_of_an_engine_with_live_restore(
    engine: PrivateEngine, tmp_path: Path
) -> None:
    with on(engine, tmp_path) as host:
        await prepared(host)
        running = asyncio.create_task(python(host, key(0), WAITS))
        await runs(host)
        await asyncio.to_thread(engine.stop)
        assert await python(host, key(9), "1") == DOWN
        assert await python(host, key(1), "x") == "1", "a sandbox that runs needs no engine for a call"
        await asyncio.to_thread(engine.start, live_restore=True)
        put = f"/v1/sessions/retained/{key(0)['x-toolhost-session']}/files/go"
        assert (await asyncio.to_thread(host.request, "PUT", put, body=b""))[0] == 201
        assert await running == "100"
        for number in range(3):
            assert await python(host, key(number), "x, open('kept').read()") == f"({number}, 'file {number}')"
        assert await python(host, key(9), "6 * 7") == "42"
        await nothing_is_left(host)


async def test_without_live_restore_a_restart_loses_variables_and_says_so_and_files_are_kept(
    engine: PrivateEngine, tmp_path: Path
) -> None:
    await asyncio.to_thread(engine.restart, live_restore=False)
    with on(engine, tmp_path) as host:
        await prepared(host)
        running = asyncio.create_task(python(host, key(0), WAITS))
        await runs(host)
        await asyncio.to_thread(engine.stop)
        assert LOST in await running
        assert await python(host, key(1), "x") == DOWN
        await asyncio.to_thread(engine.start, live_restore=False)
        for number in range(3):
            text = await python(host, key(number), "globals().get('x'), open('kept').read()")
            assert text.endswith(f"(None, 'file {number}')")
            assert (LOST in text) is (number != 0), "each loss is told once, with the first result after it"
            assert await python(host, key(number), "6 * 7") == "42"
        await nothing_is_left(host)


async def test_an_engine_that_is_stopped_for_10_s_under_load_wedges_nothing(
    engine: PrivateEngine, tmp_path: Path
) -> None:
    with on(engine, tmp_path) as host:
        await prepared(host)
        with engine.frozen():
            until_thawed = time.monotonic() + 10
            fresh = [asyncio.create_task(python(host, key(number), "6 * 7")) for number in range(10, 13)]
            closing = asyncio.create_task(admin(host, f"/{digest(2)}", "DELETE"))
            calls = 0
            while time.monotonic() < until_thawed:
                answers = await asyncio.gather(*(python(host, key(number), "x") for number in range(2)))
                assert answers == ["0", "1"], "a sandbox that runs needs no engine for a call"
                assert (await asyncio.to_thread(host.get, "/livez"))[0] == 200
                calls += 1
            assert calls >= 3, "they were answered while it was stopped"
        await closing
        for text in await asyncio.gather(*fresh):
            assert text == "42" or text.startswith("Error: the Docker engine "), text
        for number in range(10, 13):
            assert await python(host, key(number), "6 * 7") == "42"
        assert await python(host, key(2), "globals().get('x')") != "2"
        await nothing_is_left(host)
