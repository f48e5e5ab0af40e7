"""Building the sandbox image with a Docker engine, from the recipe and, where it can be had, a wheelhouse.

The packages come from a wheelhouse that this machine fetched for the base image's Python, so that the build itself
needs no network, proxy or certificates. Where it cannot be fetched, the build container fetches them itself.

Above: `toolhost setup --docker`, `doctor`, the docker backend's check. Below: the docker SDK.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import docker
import requests
from docker import errors

from sandboxes.environment import wheelhouse
from sandboxes.environment.command import BuildFailed, Report, Step, Steps
from sandboxes.environment.embedded import Status, build_lock
from sandboxes.environment.interpreter import FACTS, Interpreter, Target, parse_facts
from sandboxes.environment.recipe import IMAGE_FILES, image_digest, recipe_directory

DEFAULT_TAG = "toolhost-python:latest"
DEFAULT_BASE = "python:3.12-slim"
BASE_LABEL = "org.toolhost.base"
DIGEST_LABEL = "org.toolhost.environment"
STAGE_LABEL = "org.toolhost.stage=build"  # on the intermediate image, as the Dockerfile says

FACTS_DEADLINE_S = 60.0


def image_status(client: docker.DockerClient, tag: str) -> Status:
    """Whether the engine has an image of this name, made from this recipe.

    An image without the recipe's label is an operator's own, and never stale. Raises BuildFailed when the engine does
    not answer.
    """
    labels = _labels(client, tag)
    if labels is None:
        return Status.MISSING
    return Status.READY if labels.get(DIGEST_LABEL, image_digest()) == image_digest() else Status.STALE


def _labels(client: docker.DockerClient, tag: str) -> dict[str, str] | None:
    try:
        return dict(client.images.get(tag).labels)
    except errors.ImageNotFound:
        return None
    except (errors.DockerException, requests.RequestException) as error:
        raise BuildFailed(f"the Docker engine does not answer: {_short(error)}") from error


def build_image(
    client: docker.DockerClient,
    tag: str,
    *,
    base_image: str | None,
    wheels: Path,
    report: Report,
    force: bool = False,
) -> bool:
    """Builds the image `tag` unless it is ready; says whether it built one.

    `base_image`: what to build on; None is what the present one was built on, or DEFAULT_BASE. `wheels`: where
    wheelhouses are kept. `force`: build even when it is ready. An image of that name stays in use until the new one is
    finished. `client` should have a timeout of minutes: a build's quiet steps are that long.
    Raises BuildFailed. An interrupted build is ended by the engine.
    """
    built_on = (_labels(client, tag) or {}).get(BASE_LABEL)
    if not force and image_status(client, tag) is Status.READY and base_image in (None, built_on):
        return False
    base_image = base_image or built_on or DEFAULT_BASE
    steps = Steps(report, [Step.BASE, Step.INSPECT, Step.DOWNLOAD, Step.BUILD])
    try:
        steps.begin(Step.BASE)
        _ensure_base(client, base_image, steps)
        steps.begin(Step.INSPECT)
        interpreter = _inspect_base(client, base_image)
        steps.begin(Step.DOWNLOAD)
        with build_lock(wheels):
            house = _wheelhouse(wheels, interpreter.target, steps)
            steps.begin(Step.BUILD)
            try:
                _build(client, tag, base_image, house, steps)
            finally:
                _prune(client)
    except (errors.DockerException, requests.RequestException) as error:
        raise BuildFailed(f"the Docker engine failed: {_short(error)}") from error
    return True


def _prune(client: docker.DockerClient) -> None:
    """Removes the build stage, and the image that had this name before unless a container still runs on it."""
    for label in (STAGE_LABEL, DIGEST_LABEL):
        client.images.prune(filters={"dangling": True, "label": label})


def _ensure_base(client: docker.DockerClient, base_image: str, steps: Steps) -> None:
    try:
        client.images.get(base_image)
        return
    except errors.ImageNotFound:
        pass
    repository, _, tag = base_image.rpartition(":") if ":" in base_image.rsplit("/", 1)[-1] else (base_image, "", "")
    try:
        for event in client.api.pull(repository, tag=tag or "latest", stream=True, decode=True):
            if "error" in event:
                raise errors.APIError(str(event["error"]))
            steps.detail(f"{base_image}: {event.get('id', '')} {event.get('status', '')}")
    except errors.APIError as error:
        raise BuildFailed(
            f"the base image {base_image} is not here and cannot be pulled ({_short(error)}). Name one that is here or "
            f"that can be pulled with --base-image, or make one from Debian packages: "
            f"{recipe_directory() / 'make-base-image'}, then: toolhost setup --docker "
            "--base-image toolhost-base:debian12"
        ) from error


def _inspect_base(client: docker.DockerClient, base_image: str) -> Interpreter:
    container = client.containers.create(
        base_image, ["-I", "-c", FACTS.read_text()], entrypoint=["python3"], network_mode="none", user="0"
    )
    try:
        container.start()
        container.wait(timeout=FACTS_DEADLINE_S)
        output = container.logs(stdout=True, stderr=False).decode("utf-8", "replace")
    except errors.APIError as error:
        raise BuildFailed(
            f"the base image {base_image} has no python3 on its PATH ({_short(error)}): choose another"
        ) from error
    finally:
        container.remove(force=True)
    return parse_facts(output, f"the Python of {base_image}")


def _wheelhouse(wheels: Path, target: Target, steps: Steps) -> Path | None:
    """The wheelhouse, or None where the build has to fetch the packages itself."""
    try:
        return wheelhouse.fill(wheels, target, python=None, on_line=steps.detail)
    except BuildFailed as error:
        steps.detail(f"{error.message}\nThe build container tries it now.")
        return None


def _build(client: docker.DockerClient, tag: str, base_image: str, house: Path | None, steps: Steps) -> None:
    output: list[str] = []
    with _context(house) as context:
        events = client.api.build(
            fileobj=context,
            custom_context=True,
            tag=tag,
            buildargs={"BASE_IMAGE": base_image, "ENVIRONMENT_DIGEST": image_digest()},
            rm=True,
            forcerm=True,
            decode=True,
            network_mode="none" if house else None,
            use_config_proxy=True,
        )
        for event in events:
            if "error" in event:
                shown = "\n".join(f"  {line}" for line in output[-15:])
                raise BuildFailed(f"the image could not be built: {event['error']}\nThe last lines were:\n{shown}")
            for line in str(event.get("stream", "")).splitlines():
                if line.strip():
                    output.append(line)
                    steps.detail(line)


@contextmanager
def _context(house: Path | None) -> Iterator[IO[bytes]]:
    """The build context as a tar file. Nothing in it depends on who builds or when, so layers are found again."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in ("requirements.txt", *IMAGE_FILES):
                _add(tar, name, recipe_directory() / name)
            for wheel in sorted(house.glob("*.whl")) if house else []:
                _add(tar, f"wheelhouse/{wheel.name}", wheel)
        file.seek(0, io.SEEK_SET)
        yield file


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    info = tarfile.TarInfo(name)
    info.size = path.stat().st_size
    info.mode = 0o644
    with path.open("rb") as file:
        tar.addfile(info, file)


def _short(error: Exception) -> str:
    explanation: Any = getattr(error, "explanation", None)
    return str(explanation or error).strip()
