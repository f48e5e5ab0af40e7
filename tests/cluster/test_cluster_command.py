"""`toolhost cluster up` and `down` on machines of their own: what they start, what they say, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import Machine, Site
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

STATE = "/run/toolhost-state"  # of each machine, and as short as an installed one
TOOLHOST = [sys.executable, "-m", "toolhost", "cluster"]
RAY = ("gcs_server", "raylet", "ray::", "ray.scripts", "ray_process_reaper")
RAYS_PATIENCE_S = 19.0  # it tries 20 times with pauses of a second, also when the head refuses the token
NODES = """
import json, sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps([[node["NodeManagerAddress"], node["Resources"].get("toolhost_session", 0)]
                  for node in ray.nodes() if node["Alive"]]))
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as made:
        for name in ("head", "node", "other"):
            made.machine(name)
        yield made


@pytest.fixture(scope="module")
def token(site: Site) -> Path:
    """The head's token, where every machine sees it, after `up --head`."""
    file = site.shared / "token"
    head = site.machines["head"]
    assert "--node-address" in cluster(head, "up", "--head", code=2).stderr, "it has no route and its name no address"
    said = cluster(head, "up", "--head", "--sessions", "3", "--token-file", str(file), "--node-address", head.address)
    address = f"{head.address}:6379"
    assert f"the head is up: {address}, 3 sessions" in said.stdout
    assert f"toolhost cluster up --address {address}" in said.stdout
    assert file.stat().st_mode & 0o777 == 0o600
    for name in ("node", "other"):
        machine = site.machines[name]
        assert "owner" in cluster(machine, *join(site, file), code=2).stderr
        machine.run(["mkdir", "-p", STATE])
        (machine.root / f"{STATE[1:]}/owner").write_bytes((head.root / f"{STATE[1:]}/owner").read_bytes())
    return file


def cluster(machine: Machine, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = machine.run([*TOOLHOST, *arguments, "--state-dir", STATE], environment=environment, check=False, timeout=150)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def of_ray(machine: Machine) -> list[str]:
    return [process.command for process in machine.processes() if any(name in process.command for name in RAY)]


def join(site: Site, token: Path) -> list[str]:
    return ["up", "--address", f"{site.machines['head'].address}:6379", "--token-file", str(token)]


def test_a_node_joins_is_seen_and_leaves(site: Site, token: Path) -> None:
    node = site.machines["node"]
    said = cluster(node, *join(site, token), "--sessions", "5").stdout
    assert "this machine has joined" in said and "5 sessions" in said
    again = cluster(node, *join(site, token), code=1).stderr
    assert "already" in again and "toolhost cluster down" in again
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    address = f"{site.machines['head'].address}:6379"
    listed = json.loads(node.python(NODES, address, environment=environment).stdout.splitlines()[-1])
    assert sorted(listed) == [[site.machines["head"].address, 3.0], [node.address, 5.0]]
    refused = cluster(node, "down", code=2).stderr
    assert "--yes" in refused
    cluster(node, "down", "--yes")
    assert of_ray(node) == []
    assert "nothing is up here" in cluster(node, "down", "--yes", code=1).stderr


def test_down_ends_no_other_ray_of_the_machine(site: Site, token: Path) -> None:
    """Somebody's own cluster on the same machine, started by Ray's own command: neither sees the other."""
    node = site.machines["node"]
    own = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=7000", "--num-cpus=0"]
    node.run([*own, "--include-dashboard=false", "--disable-usage-stats"], timeout=100)
    before = of_ray(node)
    assert before
    current = node.run(["cat", "/tmp/ray/ray_current_cluster"]).stdout
    cluster(node, *join(site, token), "--sessions", "1")
    assert len(of_ray(node)) > len(before)
    assert node.run(["cat", "/tmp/ray/ray_current_cluster"]).stdout == current
    cluster(node, "down", "--yes")
    assert set(of_ray(node)) == set(before)
    node.kill()
    node.boot()


@pytest.mark.parametrize("content", ["f" * 64, ""])
def test_a_wrong_token_is_said(site: Site, token: Path, content: str) -> None:
    other = site.machines["other"]
    wrong = site.shared / "wrong"
    wrong.write_text(content)
    wrong.chmod(0o600)
    said = cluster(other, *join(site, wrong), code=4 if content else 2).stderr
    assert "token" in said and ("copy the head's" in said)
    assert of_ray(other) == []


def test_a_token_that_others_can_read_or_that_is_not_there_is_said(site: Site, token: Path) -> None:
    other = site.machines["other"]
    loose = site.shared / "loose"
    loose.write_text(token.read_text())
    loose.chmod(0o644)
    assert f"chmod 600 {loose}" in cluster(other, *join(site, loose), code=2).stderr
    assert "copy the head's there" in cluster(other, *join(site, site.shared / "none"), code=2).stderr


def test_a_head_that_is_not_there_is_said(site: Site, token: Path) -> None:
    other = site.machines["other"]
    for address in (f"{other.address}:6379", "10.111.0.250:6379"):
        said = cluster(other, "up", "--address", address, "--token-file", str(token), code=3).stderr
        assert address in said and "toolhost cluster up --head" in said


def test_other_versions_are_named(site: Site, token: Path) -> None:
    other = site.machines["other"]
    # Ray is started by this interpreter: a module on its path gives it another version of itself.
    (site.shared / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('ray.scripts' in word for word in sys.orig_argv):\n"
        "    import ray\n"
        "    ray.__version__ = '2.0.1'\n"
    )
    path = f"{site.shared}:{os.environ.get('PYTHONPATH', '')}"
    said = cluster(other, *join(site, token), code=4, PYTHONPATH=path).stderr
    assert "this machine Ray 2.0.1" in said and "must be the same on every machine" in said
    assert of_ray(other) == []


def test_without_ray_it_says_what_to_install(site: Site) -> None:
    code = "import sys; sys.modules['ray'] = None; import toolhost.cli; toolhost.cli.main()"
    done = site.machines["other"].python(code, "cluster", "up", "--head", "--state-dir", STATE, check=False)
    assert done.returncode == 2 and "pip install 'toolhost[ray]'" in done.stderr


def test_wrong_usage_is_said(site: Site) -> None:
    other = site.machines["other"]
    assert "--head" in cluster(other, "up", code=2).stderr
    assert "--head" in cluster(other, "up", "--head", "--address", "10.111.0.11:6379", code=2).stderr
    assert "HOST:PORT" in cluster(other, "up", "--address", "nowhere", code=2).stderr


@pytest.mark.parametrize("moment", ["ray.scripts", "raylet/raylet"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_undoes_what_was_begun(site: Site, token: Path, number: int, moment: str) -> None:
    other = site.machines["other"]
    begun = other.popen(
        [*TOOLHOST, *join(site, token), "--state-dir", STATE], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    await until(lambda: any(moment in one for one in of_ray(other)), "Ray was not started")
    begun.send_signal(number)
    assert begun.wait(60) == 130
    begun.close()
    await until(lambda: of_ray(other) == [], "Ray was left")
    assert "nothing is up here" in cluster(other, "down", "--yes", code=1).stderr


def test_a_port_in_use_is_said(site: Site, token: Path) -> None:
    head = site.machines["head"]
    second = [*TOOLHOST, "up", "--head", "--node-address", head.address, "--state-dir", "/run/second"]
    said = head.run(second, check=False)
    assert said.returncode == 2 and "--port" in said.stderr


def test_a_node_that_died_is_no_obstacle(site: Site, token: Path) -> None:
    other = site.machines["other"]
    cluster(other, *join(site, token), "--sessions", "0")
    other.kill()
    other.boot()
    cluster(other, *join(site, token), "--sessions", "0")
    cluster(other, "down", "--yes")


STATUS = ("status", "--token-file")


@pytest.fixture(scope="module")
def node(site: Site, token: Path) -> Machine:
    """A node that stays up."""
    node = site.machines["node"]
    cluster(node, *join(site, token), "--sessions", "5")
    return node


def test_status_and_drain(site: Site, token: Path, node: Machine) -> None:
    head = site.machines["head"]
    listed = json.loads(cluster(node, *STATUS, str(token), "--json").stdout)
    assert listed["head"] == f"{head.address}:6379"
    assert listed["wrong"] == []
    assert {one["host"]: (one["capacity"], one["sandboxes"], one["draining"]) for one in listed["nodes"]} == {
        head.address: (3, 0, False),
        node.address: (5, 0, False),
    }
    assert listed["capacity"] == 8 and listed["sessions"] == 0
    assert all(one["versions"]["ray"] and one["versions"]["python"] for one in listed["nodes"])
    said = cluster(node, "drain", node.address, "--wait", "--token-file", str(token)).stdout
    assert f"{node.address} takes no new sessions; it has 0" in said and "is empty" in said
    lines = cluster(head, *STATUS, str(token)).stdout.splitlines()
    assert [line.split("\t")[:4] for line in lines] == [
        [head.address, "up", "0", "3"],
        [node.address, "draining", "0", "5"],
    ]
    cluster(node, "drain", node.address, "--undo", "--token-file", str(token))
    assert json.loads(cluster(node, *STATUS, str(token), "--json").stdout)["capacity"] == 8
    assert "no node" in cluster(node, "drain", "10.111.0.250", "--token-file", str(token), code=1).stderr


def test_status_from_outside_and_with_a_wrong_token(site: Site, token: Path, node: Machine) -> None:
    other = site.machines["other"]
    assert "toolhost cluster up" in cluster(other, *STATUS, str(token), code=2).stderr
    wrong, empty = site.shared / "wrong", site.shared / "empty"
    wrong.write_text("f" * 64)
    empty.write_text("")
    given = (*STATUS, str(wrong)), (*STATUS, str(empty)), (*STATUS, str(site.shared / "none")), ("status",)
    for arguments in given:  # in the last case there is none at all
        began = time.monotonic()
        said = cluster(node, *arguments, code=4).stderr
        assert "token" in said and "copy the head's" in said
        assert time.monotonic() - began < RAYS_PATIENCE_S, "to try again changes nothing"


def test_status_names_another_version_of_toolhost(site: Site, token: Path) -> None:
    """A node that has another toolhost than who asks: both are named, and status says that something is wrong."""
    head, other = site.machines["head"], site.machines["other"]
    place = site.shared / "other-version"
    (place / "toolhost-9.9.dist-info").mkdir(parents=True)
    (place / "toolhost-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toolhost\nVersion: 9.9\n")
    mine = site.shared / "own-version"
    (mine / "toolhost-9.8.dist-info").mkdir(parents=True)
    (mine / "toolhost-9.8.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toolhost\nVersion: 9.8\n")
    path = os.environ.get("PYTHONPATH", "")
    cluster(other, *join(site, token), "--sessions", "1", PYTHONPATH=f"{place}:{path}")
    said = cluster(head, *STATUS, str(token), code=1, PYTHONPATH=f"{mine}:{path}")
    assert f"node {other.address} has toolhost 9.9, this machine 9.8" in said.stderr
    cluster(other, "down", "--yes")
