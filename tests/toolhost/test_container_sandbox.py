"""The container namespace in a real sandbox: one place with python, shells that remember."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import RunningHost
from tests.toolhost.rawclient import Stream

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),  # there the agent and user code are of different uids
    ],
)
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHost]:
    state_dir: Path = tmp_path_factory.mktemp("container") / "state"
    running = RunningHost(state_dir, backend=request.param).start()
    yield running
    running.purge()


async def connect(host: RunningHost, namespace: str, session: str) -> Stream:
    stream = await Stream.open(host.port, f"/{namespace}/sse", [("x-session-id", session)])
    await stream.initialize()
    return stream


async def run(stream: Stream, cmd: object, **arguments: object) -> str:
    result = await stream.tool("exec", {"cmd": cmd, **arguments})
    assert not result["isError"], result
    return str(result["content"][0]["text"])


async def test_python_and_container_share_the_sandbox_and_its_files(host: RunningHost) -> None:
    async with await connect(host, "python", "both") as python, await connect(host, "container", "both") as container:
        await python.python("open('/mnt/data/note.txt', 'w').write('from python')")
        assert await run(container, ["cat", "note.txt"]) == "from python\n[Exit code 0.]"
        text = await run(container, "echo from shell > note.txt; pwd")
        assert text.startswith("/mnt/data\n") and "[File written: /mnt/data/note.txt" in text
        assert "from shell" in await python.python("print(open('note.txt').read())")
    async with await connect(host, "container", "other") as container:
        assert "[Exit code 1.]" in await run(container, ["cat", "/mnt/data/note.txt"])


async def test_a_named_shell_remembers_and_a_command_alone_does_not(host: RunningHost) -> None:
    async with await connect(host, "container", "shells") as container:
        await run(container, ["bash", "-lc", "cd /tmp && x=41"], session_name="work")
        assert await run(container, "echo $((x + 1)) $PWD", session_name="work") == "42 /tmp\n[Exit code 0.]"
        assert await run(container, ["pwd"], session_name="work") == "/tmp\n[Exit code 0.]"
        assert "/mnt/data\n" in await run(container, "pwd", session_name="other")
        assert "/mnt/data\n" in await run(container, '["pwd"]')
    async with await connect(host, "container", "shells") as container:
        assert "41" in await run(container, "echo $x", session_name="work")


async def test_environment_directory_and_exit_code_are_as_asked(host: RunningHost) -> None:
    async with await connect(host, "container", "arguments") as container:
        asked = {"env": {"A": "a b"}, "workdir": "/tmp"}
        assert await run(container, ["sh", "-c", 'echo "$A" "$PWD"; exit 7'], **asked) == "a b /tmp\n[Exit code 7.]"
        assert "127" in await run(container, ["no-such-program"])


async def test_a_timeout_ends_the_command_and_keeps_the_rest(host: RunningHost) -> None:
    async with await connect(host, "container", "late") as container:
        text = await run(container, "echo begun; sleep 60", timeout=1)
        assert text.startswith("begun\n[Timed out after 1 s")
        assert "ok\n" in await run(container, ["echo", "ok"])


async def test_another_user_is_refused_with_what_is_there(host: RunningHost) -> None:
    async with await connect(host, "container", "users") as container:
        refused = await container.tool("exec", {"cmd": ["id"], "user": "root"})
        assert refused["isError"] and "another user is not available" in refused["content"][0]["text"]
        assert "ok" in await run(container, ["echo", "ok"])
