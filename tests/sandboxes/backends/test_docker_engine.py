"""An engine that hangs, is missing or lacks something: bounded waits, clear texts, and nobody else is delayed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandboxes.backends import docker as backend_module
from sandboxes.backends import docker_engine, docker_sandboxes
from sandboxes.backends.base import Life
from sandboxes.backends.docker import DockerBackend
from sandboxes.backends.docker_container import LABEL
from sandboxes.backends.docker_probe import engine_problems, how_to_get, old_engine, read_look
from sandboxes.client import AgentClient
from sandboxes.environment.image import DEFAULT_TAG
from sandboxes.errors import EngineUnavailable, EnvironmentMissing, IsolationUnavailable, StateLost
from sandboxes.spec import Limits, SandboxSpec
from tests.sandboxes.backends.docker_host import ENGINE, IMAGE, SMALL, DockerHost, engine

live = pytest.mark.docker


class Proxy:
    """A way to the engine on which requests can be made to hang: those whose first line matches `stall`, or the first
    of them (`once`)."""

    def __init__(self) -> None:
        self.stall: re.Pattern[bytes] | None = None
        self.once = False
        self.stalled = asyncio.Event()
        self.release = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        upstream, out = await asyncio.open_unix_connection(ENGINE.removeprefix("unix://"))
        back = asyncio.create_task(self._copy(upstream, writer))
        try:
            while piece := await reader.read(1 << 16):
                if self.stall is not None and self.stall.search(piece.partition(b"\r\n")[0]):
                    self.stalled.set()
                    if self.once:
                        self.stall = None
                    await self.release.wait()
                out.write(piece)
                await out.drain()
            out.write_eof()
            await back
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            back.cancel()
            for end in (out, writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    @staticmethod
    async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(1 << 16):
                sink.write(piece)
                await sink.drain()
            sink.write_eof()

    async def end(self) -> None:
        self.release.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, str]]:
    proxy = Proxy()
    with tempfile.TemporaryDirectory() as directory:  # a short path: it is a unix socket's
        address = Path(directory) / "engine"
        async with await asyncio.start_unix_server(proxy.serve, address):
            yield proxy, f"unix://{address}"
            await proxy.end()


@asynccontextmanager
async def opened(place: DockerHost, **options: Any) -> AsyncIterator[DockerBackend]:
    backend = place.backend(**options)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()
        async with contextlib.AsyncExitStack() as stack:
            clean = place.backend()
            stack.push_async_callback(clean.close)
            await clean.open()
            for handle in await clean.list_owned():
                await clean.destroy(handle)
        assert place.leftovers() == []


# --- hanging ---------------------------------------------------------------------------------------------------------


@live
@pytest.mark.timeout(180)
async def test_hung_start_delays_none_of_twenty_others_and_gets_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_sandboxes, "REQUEST_S", 20.0)
    place = DockerHost(tmp_path)
    spec = SandboxSpec(limits=Limits(memory_bytes=128 << 20, tmp_bytes=16 << 20, shm_bytes=16 << 20))
    async with proxied() as (proxy, address), opened(place, engine_url=address) as backend:
        proxy.stall = re.compile(rb"POST \S+/containers/create\?name=\S+hung")
        hung = asyncio.create_task(backend.launch("hung", spec, "w-hung"))
        await asyncio.wait_for(proxy.stalled.wait(), 20)
        handles = await asyncio.gather(*(backend.launch(f"k-{n}", spec, f"w-{n}") for n in range(20)))
        assert len({handle.instance for handle in handles}) == 20
        assert not hung.done()
        assert (await backend.poll(handles[0])).life is Life.RUNNING
        with pytest.raises(EngineUnavailable, match="Docker engine"):
            await hung
        assert await backend.lookup("hung") is None


@live
@pytest.mark.parametrize("path", ["/version", "/info", "/networks", "/images/"])
async def test_one_answer_that_does_not_come_does_not_keep_it_from_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(docker_engine, "PATIENCE_S", (1.0, 20.0))
    async with proxied() as (proxy, address):
        proxy.stall, proxy.once = re.compile(rb"GET \S*" + path.encode()), True
        async with opened(DockerHost(tmp_path), engine_url=address) as backend:
            assert proxy.stalled.is_set()
            assert await backend.list_owned() == []


@live
@pytest.mark.parametrize("channel", ["socket", "attach"])
async def test_hung_look_ends_by_its_deadline_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channel: str
) -> None:
    place = DockerHost(tmp_path)
    async with proxied() as (proxy, address), opened(place, engine_url=address, channel=channel) as backend:
        handle = await backend.launch("k-1", SMALL, "w-1")
        monkeypatch.setattr(backend_module, "LOOK_S", 1.0)
        proxy.stall = re.compile(rb"GET \S+/containers/")
        looks = [backend.poll(handle), backend.usage(handle), backend.list_owned()]
        if channel == "attach":
            looks.append(backend.connect(handle))
        for look in looks:
            with pytest.raises(EngineUnavailable, match="did not answer within 1 s"):
                await look
        if channel == "socket":  # it says itself that it runs
            client = await AgentClient.connect(await backend.connect(handle))
            await client.ping()
            await client.close()
        monkeypatch.undo()
        proxy.stall = None
        proxy.release.set()
        assert (await backend.poll(handle)).life is Life.RUNNING


@live
async def test_cancelled_launch_that_the_engine_holds_up_leaves_nothing_once_it_goes_on(tmp_path: Path) -> None:
    place = DockerHost(tmp_path)
    async with proxied() as (proxy, address), opened(place, engine_url=address) as backend:
        proxy.stall = re.compile(rb"POST \S+/start")
        launch = asyncio.create_task(backend.launch("k-1", SMALL, "w-1"))
        await asyncio.wait_for(proxy.stalled.wait(), 20)
        launch.cancel()
        proxy.stall = None
        proxy.release.set()
        with pytest.raises(asyncio.CancelledError):
            await launch
        assert place.leftovers() == []


# --- missing ---------------------------------------------------------------------------------------------------------


async def test_missing_engine_is_named_with_what_to_do(tmp_path: Path) -> None:
    backend = DockerHost(tmp_path).backend(engine_url=f"unix://{tmp_path}/none")
    with pytest.raises(EngineUnavailable, match="no Docker engine answers at"):
        await backend.open()
    [problem] = await backend.probe()
    assert problem.fatal
    assert "start the Docker engine" in problem.mend
    await backend.close()


def test_our_own_image_is_built() -> None:
    assert how_to_get(DEFAULT_TAG) == "toolhost setup --docker"


@live
async def test_missing_image_names_the_command_that_brings_just_this_one(tmp_path: Path) -> None:
    backend = DockerHost(tmp_path).backend(image="toolhost-none:none")
    with pytest.raises(EnvironmentMissing, match="run: docker pull toolhost-none:none, or toolhost setup"):
        await backend.open()
    assert any(problem.mend.endswith("--tag toolhost-none:none") and problem.fatal for problem in await backend.probe())
    await backend.close()


@live
async def test_missing_runtime_and_network_are_named_before_anything_starts(tmp_path: Path) -> None:
    for options, what in (({"runtime": "nope"}, "nope"), ({"networks": frozenset({"no-net"})}, "no-net")):
        backend = DockerHost(tmp_path).backend(**options)
        with pytest.raises(IsolationUnavailable, match=what):
            await backend.open()
        await backend.close()


@live
async def test_egress_that_the_settings_do_not_allow_is_refused(tmp_path: Path) -> None:
    place = DockerHost(tmp_path)
    async with opened(place) as backend:
        for network in ("bridge", "host", "container:other"):
            with pytest.raises(IsolationUnavailable, match="egress"):
                await backend.launch("k-1", SandboxSpec(limits=SMALL.limits, egress=network), "w-1")


@live
async def test_container_that_ends_at_once_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    place = DockerHost(tmp_path / "state")
    broken = tmp_path / "agent"
    broken.mkdir(parents=True)
    (broken / "toolhost_agent.py").write_text("raise SystemExit('this agent is broken')")
    async with opened(place, agent=broken) as backend:
        with pytest.raises(EnvironmentMissing, match=r"ended at once .*this agent is broken"):
            await backend.launch("k-1", SMALL, "w-1")
        assert place.leftovers() == []


@live
async def test_image_without_python_is_refused_with_the_reason_and_doctor_says_so(tmp_path: Path) -> None:
    api = engine()
    scratch = api.create_container(IMAGE, ["true"])["Id"]
    bare = f"toolhost-test-bare:{scratch[:12]}"
    try:
        # The same image, whose PATH leads nowhere.
        api.commit(scratch, *bare.split(":"), changes=["ENV PATH=/nowhere"])
        place = DockerHost(tmp_path)
        async with opened(place, image=bare) as backend:
            with pytest.raises(EnvironmentMissing, match="no python3"):
                await backend.launch("k-1", SMALL, "w-1")
            assert any("cannot be run" in problem.what and problem.fatal for problem in await backend.probe())
    finally:
        api.remove_container(scratch, force=True)
        api.remove_image(bare, force=True)
        api.close()


# --- what doctor says ------------------------------------------------------------------------------------------------


@live
async def test_doctor_finds_nothing_fatal_in_the_shipped_image(tmp_path: Path) -> None:
    backend = DockerHost(tmp_path).backend()
    assert [problem for problem in await backend.probe() if problem.fatal or IMAGE in problem.what] == []
    await backend.close()
    api = engine()
    assert api.containers(all=True, filters={"label": f"{LABEL}purpose=look"}) == []
    api.close()


def test_doctor_says_what_an_engine_lacks() -> None:
    info = {"LiveRestoreEnabled": False, "Runtimes": {"runc": {}}, "PidsLimit": False, "SecurityOptions": []}
    found = engine_problems(info, "runsc", ["bridge"], frozenset({"egress"}))
    told = " ".join(problem.what for problem in found)
    for word in ("live-restore", "runsc", "processes", "seccomp", "egress"):
        assert word in told
    assert {problem.what.split("'")[1] for problem in found if problem.fatal} == {"runsc", "egress"}
    assert all(problem.mend for problem in found)


def test_doctor_finds_nothing_wrong_with_a_sound_engine() -> None:
    info = {"LiveRestoreEnabled": True, "Runtimes": {"runc": {}}, "SecurityOptions": ["name=seccomp,profile=default"]}
    assert engine_problems(info, None, [], frozenset()) == []
    assert old_engine({"ApiVersion": "1.41"}) is None
    assert "update" in (old_engine({"ApiVersion": "1.40"}) or "")


def test_doctor_says_what_an_image_lacks() -> None:
    [problem] = read_look("mine", '[[3, 11, 2], ["IPython"]]\n', 0)
    assert "no IPython" in problem.what
    assert not problem.fatal
    assert read_look("mine", "[[3, 12, 0], []]", 0) == []


@pytest.mark.parametrize("said", ["", "Segmentation fault", "[]", "[[3, 10, 0], []]", '["x", []]', "[[null], []]"])
def test_image_whose_python_is_unfit_is_fatal(said: str) -> None:
    [problem] = read_look("mine", said, 1)
    assert problem.fatal


# --- two hosts -------------------------------------------------------------------------------------------------------


@live
async def test_container_of_another_owner_is_neither_found_nor_destroyed_by_its_handle(tmp_path: Path) -> None:
    place = DockerHost(tmp_path)
    async with opened(place) as ours:
        stranger = place.backend(place.stranger)
        await stranger.open()
        theirs = await stranger.launch("k-1", SMALL, "w-stranger")
        assert await ours.lookup("k-1") is None
        assert (await ours.poll(theirs)).life is Life.GONE
        with pytest.raises(StateLost):
            await ours.connect(theirs)
        await ours.destroy(theirs, keep_workspace=True)
        assert (await stranger.poll(theirs)).life is Life.RUNNING
        await stranger.destroy(theirs)
        await stranger.close()


@live
async def test_container_that_ended_is_replaced_with_its_files(tmp_path: Path) -> None:
    place = DockerHost(tmp_path)
    async with opened(place) as backend:
        first = await backend.launch("k-1", SMALL, "w-1")
        api = engine()
        api.kill(first.instance)
        api.wait(first.instance, timeout=20)
        api.close()
        status = await backend.poll(first)
        assert status.life is Life.ENDED
        assert "exit code 137" in status.detail
        assert not status.out_of_memory
        assert await backend.lookup("k-1") is None
        assert [handle.instance for handle in await backend.list_owned()] == [first.instance]
        second = await backend.launch("k-1", SMALL, "w-1")
        assert second.instance != first.instance
        assert [handle.instance for handle in await backend.list_owned()] == [second.instance]
