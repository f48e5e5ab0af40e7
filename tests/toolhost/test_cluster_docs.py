"""docs/cluster.md and its examples: manifests parse and agree with the program, settings in them exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandboxes.backends.ray_names import RESOURCE
from tests.support.cluster import HEALTH
from toolhost.cli.cluster_node import DEFAULTS
from toolhost.config import load

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cluster.md").read_text()
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DOCS / "examples" / "kuberay.yaml").read_text()))


def manifest(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name))


def pods() -> dict[str, dict[str, Any]]:
    """The Pod specs in the manifests, by what they are."""
    ray = manifest("RayCluster", "toolhost")["spec"]
    return {
        "head": ray["headGroupSpec"]["template"]["spec"],
        "worker": ray["workerGroupSpecs"][0]["template"]["spec"],
        "toolhost": manifest("Deployment", "toolhost")["spec"]["template"]["spec"],
        "redis": manifest("StatefulSet", "toolhost-redis")["spec"]["template"]["spec"],
    }


def test_the_manifests_settings_are_settings(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(manifest("ConfigMap", "toolhost-settings")["data"]["settings.toml"])
    settings = load(file)
    assert settings.sandbox.backend == "ray"
    mounts = {mount["name"]: mount["mountPath"] for mount in pods()["toolhost"]["containers"][0]["volumeMounts"]}
    assert str(settings.ray.owner_file) == f"{mounts['secrets']}/owner"
    assert str(settings.auth.tokens_file) == f"{mounts['secrets']}/tokens"
    assert str(settings.ray.token_file) == f"{mounts['token']}/auth_token"
    assert str(settings.state_dir) == mounts["state"]
    worker = {mount["name"]: mount["mountPath"] for mount in pods()["worker"]["containers"][0]["volumeMounts"]}
    assert str(settings.ray.node_state_dir) == worker["state"]
    assert worker["secrets"] == mounts["secrets"], "the owner is at one place everywhere"
    head, store = settings.ray.address, settings.store.url
    assert head == f"{manifest('RayCluster', 'toolhost')['metadata']['name']}-head-svc:6379"
    redis = manifest("Service", "toolhost-redis")["metadata"]["name"]
    assert store is not None and store.get_secret_value().startswith(f"redis://{redis}:6379/")


def test_what_pods_mount_is_there() -> None:
    for name, pod in pods().items():
        claims = manifest("StatefulSet", "toolhost-redis")["spec"]["volumeClaimTemplates"] if name == "redis" else []
        volumes = {one["name"] for one in pod.get("volumes", [])} | {one["metadata"]["name"] for one in claims}
        mounted = {mount["name"] for one in pod["containers"] for mount in one.get("volumeMounts", [])}
        assert mounted == volumes, name
        secrets = {one["secret"]["secretName"] for one in pod.get("volumes", []) if "secret" in one}
        assert secrets <= {"toolhost-secrets", "toolhost"}
        assert all(one["secret"]["defaultMode"] == 0o400 for one in pod.get("volumes", []) if "secret" in one)


def test_services_and_policies_select_pods() -> None:
    labels = [
        manifest("Deployment", "toolhost")["spec"]["template"]["metadata"]["labels"],
        manifest("StatefulSet", "toolhost-redis")["spec"]["template"]["metadata"]["labels"],
        {"ray.io/cluster": "toolhost"},  # as KubeRay labels its Pods
    ]
    selectors = [one["spec"]["selector"] for one in MANIFESTS if one["kind"] == "Service"]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in MANIFESTS if one["kind"] == "NetworkPolicy"]
    assert len(selectors) == 4
    assert all(selector in labels for selector in selectors)


def test_nodes_take_sessions_and_the_head_none() -> None:
    ray = manifest("RayCluster", "toolhost")["spec"]
    assert "resources" not in ray["headGroupSpec"]["rayStartParams"]
    (group,) = ray["workerGroupSpecs"]
    given = json.loads(json.loads(group["rayStartParams"]["resources"]))  # JSON, quoted once more for KubeRay
    assert list(given) == [RESOURCE]
    assert "authOptions" in ray and ray["authOptions"]["mode"] == "token"


def test_the_health_checks_are_those_of_the_command_and_the_page() -> None:
    tuned = {name: value for name, value in DEFAULTS.items() if "health_check" in name or "reconnect" in name}
    for name in ("head", "worker"):
        variables = {one["name"]: one["value"] for one in pods()[name]["containers"][0]["env"]}
        assert variables == tuned
    table = dict(re.findall(r"^\| `(RAY_\w+)` \| \d+ \| (\d+) \|", PAGE, re.MULTILINE))
    assert table == tuned
    assert {name: HEALTH[name] for name in HEALTH if "health_check" in name} == {
        name: value for name, value in tuned.items() if "health_check" in name
    }, "the tests' clusters have them too"


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_the_pages_settings_are_settings(block: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(block)
    assert load(file).sandbox.backend == "ray"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (DOCS / target).exists(), target
    heads = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in PAGE.splitlines()
        if line.startswith("#")
    }
    for anchor in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert anchor in heads
