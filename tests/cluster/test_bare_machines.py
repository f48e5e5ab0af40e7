"""docs/cluster.md, "Bare machines, step by step", as it stands there, and what comes after: the head and a node go."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster.conftest import again_until, key, sandboxes
from tests.e2e.operating import python
from tests.support.host import RunningHost
from tests.support.machines import REPOSITORY, Machine, Site
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

STATE = "/run/toolhost"
PAGE = (REPOSITORY / "docs" / "cluster.md").read_text()
TOOLHOST = [sys.executable, "-m", "toolhost"]
PORT = 8000
PASSWORD = "of-the-test"


class Places:
    """The machines of the page, with Redis on a fourth."""

    def __init__(self, site: Site) -> None:
        self.redis, self.head, self.node, self.edge = (site.machine(name) for name in ("redis", "head", "node", "edge"))

    @property
    def address(self) -> str:
        return f"{self.head.address}:6379"

    def settings(self) -> str:
        """The page's own, with these machines' addresses."""
        (block,) = re.findall(r"# cluster.toml.*?```", PAGE, re.DOTALL)
        text = (
            block.removesuffix("```")
            .replace("10.0.0.1", self.head.address)
            .replace("10.0.0.5", f":{PASSWORD}@{self.redis.address}")
        )
        return f'state_dir = "{STATE}"\n{text}[server]\nlisten = "127.0.0.1:{PORT}"\n'


def run(machine: Machine, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = machine.run([*TOOLHOST, *arguments], environment={"TOOLHOST_STATE_DIR": STATE}, check=False, timeout=180)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done


@pytest.fixture
async def places(tmp_path: Path) -> AsyncIterator[Places]:
    with Site(tmp_path) as site:
        made = Places(site)
        options = ["--bind", "0.0.0.0", "--requirepass", PASSWORD, "--save", ""]
        made.redis.popen(["redis-server", *options], stdout=subprocess.DEVNULL, cwd="/")
        ping = ["redis-cli", "--no-auth-warning", "-a", PASSWORD, "ping"]
        await until(lambda: made.redis.run(ping, check=False).stdout == "PONG\n", "no Redis")
        yield made


async def test_step_by_step(places: Places, tmp_path: Path) -> None:
    head, node, edge = places.head, places.node, places.edge
    up = ["cluster", "up", "--head", "--redis", f"{places.redis.address}:6379", "--sessions", "0"]
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    up += ["--redis-password-file", str(tmp_path / "password"), "--node-address", head.address]
    said = run(head, *up).stdout
    files = re.findall(rf"{STATE}/\S+", said)
    assert files == [f"{STATE}/cluster/token", f"{STATE}/owner:"], "both secrets are named"
    for machine in (node, edge):
        machine.run(["mkdir", "-p", f"{STATE}/cluster"])
        for name in ("cluster/token", "owner"):
            file = machine.root / f"{STATE[1:]}/{name}"
            file.touch(mode=0o600)
            file.write_bytes((head.root / f"{STATE[1:]}/{name}").read_bytes())
    run(node, "cluster", "up", "--address", places.address, "--sessions", "5")

    (tmp_path / "cluster.toml").write_text(places.settings())
    # As a container's command has it (examples/kuberay.yaml): Ray's node first, then the tool host in its place.
    config = ["--config", str(tmp_path / "cluster.toml")]
    first = shlex.join([*TOOLHOST, "cluster", "up", "--address", places.address, "--sessions", "0", *config])
    serve = shlex.join([*TOOLHOST, "serve", *config])
    host = RunningHost(tmp_path / "edge", port=edge.forward(PORT))
    log = (tmp_path / "edge.log").open("wb")
    with log:
        edge.popen(["sh", "-c", f"{first} && exec {serve}"], stdout=log, stderr=log)

    async def live() -> bool:
        return (await asyncio.to_thread(lambda: host.get("/livez")))[0] == 200

    await again_until(live, bool, 180, "the tool host is not live")
    assert "Traceback" not in await python(host, key("bare"), "x = 41; open('file', 'w').write('kept')")
    assert sandboxes([node]) == [1]
    assert f"{node.address}\tup\t1\t5" in run(edge, "cluster", "status").stdout

    run(head, "cluster", "down", "--yes")
    assert await python(host, key("bare"), "x + 1") == "42", "without the head what runs goes on"
    assert "toolhost cluster up --head" in run(edge, "cluster", "status", code=3).stderr
    run(head, *up)
    assert await python(host, key("bare"), "x + 1") == "42"
    await again_until(lambda: python(host, key("new"), "1"), lambda text: text == "1", 90, "no new session")
    assert f"{node.address}\tup\t2\t5" in run(edge, "cluster", "status").stdout

    run(node, "cluster", "down", "--yes")
    await until(lambda: sandboxes([node]) == [0], "sandboxes outlive their node's Ray and their fence", 60)
    run(node, "cluster", "up", "--address", places.address, "--sessions", "5")
    told = await again_until(
        lambda: python(host, key("bare"), "globals().get('x', 'none')"), lambda text: "'none'" in text, 90, "not moved"
    )
    assert "variables and files are gone" in told.lower(), told
    assert (await python(host, key("bare"), "import os; os.path.exists('file')")) == "False"
