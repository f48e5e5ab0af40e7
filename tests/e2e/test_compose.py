"""compose.yaml as people run it: one command gives a host, `down` leaves nothing. Real engine, real Compose."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.environments import ENVIRONMENTS
from tests.support.host import free_port
from tests.support.machine import IMAGE

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "compose.yaml"
PROFILES = ("--profile", "gateway", "--profile", "vllm")
SESSION = f"kept-{uuid.uuid4().hex}"

# Runs in a container of the same network, with the SDK that the host's image has anyway.
CLIENT = """
import asyncio, json, sys
from mcp import ClientSession
from mcp.client.sse import sse_client

async def main(url, session, code):
    async with sse_client(url, headers={"x-toolhost-session": session}) as streams, ClientSession(*streams) as client:
        await client.initialize()
        result = await client.call_tool("python", {"code": code})
        print("REPORT " + json.dumps(result.content[0].text))

asyncio.run(main(*sys.argv[1:]))
"""

# The fake model on all addresses of its container: the gateway knows it by a name of the network.
MODEL = """
import sys, uvicorn
from toolhost.loop.fake_model import FakeModel, Script

app = FakeModel(Script.validate_json(sys.argv[1])).app()
uvicorn.run(app, host="0.0.0.0", port=8001, log_level="warning", lifespan="off")
"""


def test_the_file_is_valid_for_compose_1() -> None:
    docker_compose = shutil.which("docker-compose")
    if docker_compose is None:
        pytest.skip("no docker-compose (apt-get install docker-compose)")
    check_valid([docker_compose])


@pytest.mark.clients
def test_the_file_is_valid_for_compose_2() -> None:
    check_valid([str(ENVIRONMENTS["compose-2"].directory / "venv" / "bin" / "docker-compose")])


def check_valid(command: list[str]) -> None:
    done = subprocess.run(
        [*command, "-f", str(COMPOSE_FILE), *PROFILES, "config", "--services"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"setup", "sweeper", "toolhost", "redis", "gateway", "vllm"}
    assert "obsolete" not in done.stderr and "not set" not in done.stderr, done.stderr


# --- it runs ---------------------------------------------------------------------------------------------------------


class Project:
    """One compose project on the machine's engine, with a state directory and ports of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.name = f"toolhost-test-{uuid.uuid4().hex[:8]}"
        self.image = f"{self.name}:latest"
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "DOCKER_BUILDKIT": "0",
            "TOOLHOST_STATE": str(state),
            "TOOLHOST_PORT": str(free_port()),
            "TOOLHOST_GATEWAY_PORT": str(free_port()),
            "TOOLHOST_IMAGE": self.image,
            "TOOLHOST_BASE_IMAGE": base_image(),
        }

    def compose(self, *arguments: str, timeout_s: float = 240) -> str:
        command = ["docker-compose", "-p", self.name, "-f", str(COMPOSE_FILE), *arguments]
        return output(command, self.environment, timeout_s)

    def until_healthy(self, service: str = "toolhost") -> None:
        deadline = time.monotonic() + 120
        container = self.compose(*PROFILES, "ps", "-q", service).strip()
        while (
            status := output(["docker", "inspect", "-f", "{{.State.Health.Status}}", container])
        ).strip() != "healthy":
            assert time.monotonic() < deadline and status.strip() != "unhealthy", self.compose(
                *PROFILES, "logs", "--tail=50"
            )
            time.sleep(0.5)

    def python(self, code: str) -> str:
        """Runs code through the host, from a container beside it that knows it by name only."""
        client = [
            "docker",
            "run",
            "--rm",
            "-i",
            "--network",
            f"{self.name}_default",
            "--entrypoint",
            "python3",
            self.image,
        ]
        said = output([*client, "-c", CLIENT, "http://toolhost:8000/python/sse", SESSION, code])
        (report,) = [line.removeprefix("REPORT ") for line in said.splitlines() if line.startswith("REPORT ")]
        text: str = json.loads(report)
        return text

    def containers(self) -> set[str]:
        """The project's own containers, and the sandboxes: those that have something of the state directory mounted."""
        found = set()
        for container in output(["docker", "ps", "-aq", "--no-trunc"]).split():
            try:
                (details,) = json.loads(output(["docker", "inspect", container]))
            except AssertionError:
                continue  # it went meanwhile
            mounts = [mount["Source"] for mount in details["Mounts"]]
            if any(mount.startswith(str(self.state)) for mount in mounts):
                found.add(details["Name"])
        return found

    @contextlib.contextmanager
    def model(self, rounds: list[dict[str, object]]) -> Iterator[None]:
        """A fake model in the project's network, where compose.yaml expects one."""
        name = f"{self.name}-model"
        network = ["--network", f"{self.name}_default", "--network-alias", "vllm"]
        command = ["--entrypoint", "python3", self.image, "-c", MODEL, json.dumps(rounds)]
        output(["docker", "run", "-d", "--rm", "--name", name, *network, *command])
        try:
            yield
        finally:
            subprocess.run(["docker", "rm", "-f", name], capture_output=True, check=False, timeout=60)

    def redis_image(self, directory: Path) -> str:
        """The public image where the engine has it; else one of this machine's own server."""
        public = "redis:7-alpine"
        if subprocess.run(["docker", "image", "inspect", public], capture_output=True, check=False).returncode == 0:
            return public
        programs = [shutil.which(name) for name in ("redis-server", "redis-cli")]
        if None in programs:
            pytest.skip(f"neither the image {public} nor redis-server on this machine (apt install redis-server)")
        paths = {str(path) for path in programs}
        for program in programs:
            paths |= set(re.findall(r"(/\S+) \(0x", output(["ldd", str(program)])))
        for path in paths:
            place = directory / "root" / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
        (directory / "root" / "data").mkdir()
        (directory / "Dockerfile").write_text(f"FROM scratch\nENV PATH={Path(str(programs[0])).parent}\nCOPY root /\n")
        image = f"{self.name}-redis"
        output(["docker", "build", "-q", "-t", image, str(directory)], self.environment, 120)
        return image


def base_image() -> str:
    """What the sandbox image was built on: an image that can be had here."""
    label = '{{index .Config.Labels "org.toolhost.base"}}'
    return output(["docker", "image", "inspect", "-f", label, IMAGE]).strip()


def make_wheelhouse() -> None:
    """The packages for the image's build: no registry is reached from inside it."""
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    said = output(["docker", "run", "--rm", "--network", "none", base_image(), "python3", "-c", version])
    make = ["bash", "images/toolhost/make-wheelhouse", "--python", sys.executable, "--python-version", said.strip()]
    output(make, dict(os.environ), 240)


def output(command: list[str], environment: dict[str, str] | None = None, timeout_s: float = 60) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False, cwd=ROOT
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    if shutil.which("docker-compose") is None:
        pytest.skip("no docker-compose (apt-get install docker-compose)")
    found = Project(tmp_path_factory.mktemp("compose") / "state")
    make_wheelhouse()
    try:
        found.compose("build", "--force-rm", "setup", timeout_s=300)
        found.compose("up", "-d", "--no-build")
        yield found
    finally:
        subprocess.run(
            ["docker-compose", "-p", found.name, "-f", str(COMPOSE_FILE), *PROFILES, "down", "-v", "--remove-orphans"],
            env=found.environment,
            cwd=ROOT,
            capture_output=True,
            check=False,
            timeout=240,
        )
        images = ["docker", "rmi", "-f", found.image, f"{found.name}-redis"]
        subprocess.run(images, capture_output=True, check=False, timeout=60)
        stage = ["docker", "image", "prune", "-f", "--filter", "label=org.toolhost.stage=host-build"]
        subprocess.run(stage, capture_output=True, check=False, timeout=60)


@pytest.mark.docker
@pytest.mark.timeout(900)
def test_a_client_beside_it_reaches_it_state_survives_a_restart_and_down_leaves_nothing(project: Project) -> None:
    project.until_healthy()
    assert project.python("x = 41; x") == "41"
    (sandbox,) = [name for name in project.containers() if project.name not in name]
    assert output(["docker", "inspect", "-f", "{{.Config.Image}}", sandbox]).strip() == IMAGE

    project.compose("restart", "toolhost")
    project.until_healthy()
    assert project.python("x + 1") == "42", "the sandbox outlived the host's container"
    host = project.compose("ps", "-q", "toolhost").strip()
    (details,) = json.loads(output(["docker", "inspect", host]))
    assert details["HostConfig"]["ReadonlyRootfs"] and details["HostConfig"]["Memory"] > 0

    project.compose("down")
    assert project.containers() == set(), "sandboxes are ended with the project"
    networks = output(["docker", "network", "ls", "-q", "--filter", f"name={project.name}"]).split()
    volumes = output(["docker", "volume", "ls", "-q", "--filter", f"name={project.name}"]).split()
    assert networks == volumes == []
    assert (project.state / "ledger.sqlite").exists(), "what is to stay stays"


@pytest.mark.docker
@pytest.mark.timeout(900)
def test_the_gateway_of_its_profile_runs_code_and_its_history_survives_a_restart(
    project: Project, tmp_path: Path
) -> None:
    project.environment["TOOLHOST_REDIS_IMAGE"] = project.redis_image(tmp_path)
    gateway = ("--profile", "gateway")
    project.compose(*gateway, "up", "-d", "--no-build")
    project.until_healthy("gateway")
    python = {"type": "code_interpreter", "container": {"type": "auto"}}
    rounds: list[dict[str, object]] = []
    for when, code in (("Set", "x = 41"), ("Read", "print(x + 1)")):
        rounds.append({"calls": [{"name": "python", "arguments": {"code": code}}], "when": when})
        rounds.append({"text": "ok", "when": when})
    address = f"http://127.0.0.1:{project.environment['TOOLHOST_GATEWAY_PORT']}/v1"
    with project.model(rounds), openai.OpenAI(base_url=address, api_key="x", max_retries=20) as client:
        options: Any = {"model": "fake", "tools": [python], "include": ["code_interpreter_call.outputs"]}
        assert [one.id for one in client.models.list()] == ["fake"]  # tried again until the model has started
        first = client.responses.create(input="Set", **options)
        assert first.output_text == "ok"
        project.compose(*gateway, "restart", "gateway")
        second: Any = client.responses.create(input="Read", previous_response_id=first.id, **options)
        assert second.output[0].outputs[0].logs.strip() == "42"
        assert client.responses.retrieve(first.id).output_text == "ok"
    container = project.compose(*gateway, "ps", "-q", "gateway").strip()
    (details,) = json.loads(output(["docker", "inspect", container]))
    assert details["HostConfig"]["ReadonlyRootfs"] and details["HostConfig"]["Memory"] > 0
    assert not any(mount["Source"].endswith("docker.sock") for mount in details["Mounts"]), "it needs no engine"
    project.compose(*gateway, "down")
    assert project.containers() == set(), "sandboxes are ended with the project"
