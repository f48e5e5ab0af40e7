"""The image: built by a real engine without a network, found again, and stale when its recipe changes."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from sandboxes.environment import BuildFailed, Progress, Status, Step, recipe
from sandboxes.environment.image import BASE_LABEL, DIGEST_LABEL, build_image, image_status
from tests.sandboxes.backends.docker_host import ENGINE
from tests.support.machine import IMAGE

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    made = docker.DockerClient(base_url=ENGINE, timeout=300)
    yield made
    made.close()


@pytest.fixture
def tag(client: docker.DockerClient) -> Iterator[str]:
    name = f"toolhost-test-{secrets.token_hex(4)}:latest"
    yield name
    if image_status(client, name) is not Status.MISSING:
        client.images.remove(name, force=True)


@pytest.fixture
def small_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "recipe"
    shutil.copytree(recipe.recipe_directory(), place)
    (place / "requirements.txt").write_text("tabulate  # import tabulate\npip  # import pip\n")
    monkeypatch.setattr(recipe, "PLACES", (place,))
    return place


@pytest.fixture
def base(client: docker.DockerClient) -> str:
    """What the sandbox image was built on: small, and it is here."""
    return client.images.get(IMAGE).labels[BASE_LABEL]


def ignore(progress: Progress) -> None:
    del progress


def test_image_is_built_found_again_and_stale_after_a_change(
    client: docker.DockerClient, tag: str, base: str, small_list: Path, tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    steps: list[Step] = []
    assert image_status(client, tag) is Status.MISSING
    assert build_image(client, tag, base_image=base, wheels=wheels, report=lambda report: steps.append(report.step))
    assert list(dict.fromkeys(steps)) == [Step.BASE, Step.INSPECT, Step.DOWNLOAD, Step.BUILD]
    assert image_status(client, tag) is Status.READY
    labels = client.images.get(tag).labels
    assert labels[DIGEST_LABEL] == recipe.image_digest()
    assert labels[BASE_LABEL] == base
    assert not build_image(client, tag, base_image=None, wheels=wheels, report=ignore)
    assert client.api.images(filters={"dangling": True, "label": "org.toolhost.stage=build"}) == []

    code = "import os, sys, tabulate; print(tabulate.__file__, sys.prefix, os.getuid())"
    said = client.containers.run(
        tag, ["python3", "-c", code], user="64123", network_mode="none", remove=True, read_only=True
    )
    where, prefix, uid = said.decode().split()
    assert where.startswith(prefix)
    assert (prefix, uid) == ("/opt/environment", "64123")

    (small_list / "requirements.txt").write_text("pip  # import pip\n")
    assert image_status(client, tag) is Status.STALE


def test_package_that_does_not_work_fails_the_build_and_leaves_no_image(
    client: docker.DockerClient, tag: str, base: str, small_list: Path, tmp_path: Path
) -> None:
    (small_list / "requirements.txt").write_text("tabulate  # import tabulate.nothing\npip  # import pip\n")
    with pytest.raises(BuildFailed, match=r"cannot import tabulate\.nothing"):
        build_image(client, tag, base_image=base, wheels=tmp_path / "wheels", report=ignore)
    assert image_status(client, tag) is Status.MISSING


def test_base_image_that_is_not_here_names_what_makes_one(
    client: docker.DockerClient, tag: str, tmp_path: Path
) -> None:
    with pytest.raises(BuildFailed, match=r"cannot be pulled.*make-base-image"):
        build_image(client, tag, base_image="localhost:1/none:none", wheels=tmp_path, report=ignore)


def test_image_of_an_operators_own_is_never_stale(client: docker.DockerClient, base: str) -> None:
    assert DIGEST_LABEL not in client.images.get(base).labels
    assert image_status(client, base) is Status.READY


def test_same_packages_give_the_same_base_image_bit_for_bit(tmp_path: Path) -> None:
    script = recipe.recipe_directory() / "make-base-image"
    said = []
    for name in ("first", "second"):
        done = subprocess.run(
            [script, "--output", tmp_path / name], capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]
    assert "layer sha256:" in said[0]
    digests = {
        subprocess.run(["sha256sum", tmp_path / name], capture_output=True, text=True, check=True).stdout.split()[0]
        for name in ("first", "second")
    }
    assert len(digests) == 1
