"""What a container is told to be, as data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.backends.docker_container import (
    LABEL,
    SMALLEST_BYTES,
    Identity,
    Place,
    configuration,
    container_name,
    creation,
    handle_of,
    labels,
)
from sandboxes.backends.tmpfs import SPARE_BYTES, tmpfs_sizes
from sandboxes.errors import IsolationUnavailable
from sandboxes.owner import Owner
from sandboxes.spec import Limits, SandboxSpec

OWNER = Owner("0123456789abcdef", b"secret" * 6)
IDENTITY = Identity("k-1", "a" * 32, "w-1", 1700000000.125, 201_000)
PLACE = Place(Path("/state/agent"), Path("/state/w/data"), Path("/state/channel"))
SIZES = st.integers(0, 1 << 40)


def config(spec: SandboxSpec, **changes: bool) -> dict[str, object]:
    chosen = {"attached": False, "own_kernel": False, "seccomp": None, **changes}
    said = configuration(OWNER, IDENTITY, spec, search_path="/bin", times=(120.0, 2.0, None), **chosen)
    assert int(said[:8]) == len(said[8:])
    decoded: dict[str, object] = json.loads(said[8:])
    return decoded


def body(spec: SandboxSpec, place: Place = PLACE, *, own_kernel: bool = False) -> dict[str, object]:
    return creation("image", IDENTITY, spec, place, OWNER, runtime=None, own_kernel=own_kernel, network=spec.egress)


@given(st.integers(SMALLEST_BYTES, 1 << 40), SIZES, SIZES)
def test_full_tmp_and_shm_always_leave_the_agent_its_memory(memory: int, tmp: int, shm: int) -> None:
    sizes = tmpfs_sizes(Limits(memory_bytes=memory, tmp_bytes=tmp, shm_bytes=shm))
    assert sum(sizes) <= memory - SPARE_BYTES
    assert sizes[0] <= tmp
    assert sizes[1] <= shm


def test_sizes_that_fit_are_kept() -> None:
    assert tmpfs_sizes(Limits(memory_bytes=1 << 30, tmp_bytes=128 << 20, shm_bytes=64 << 20)) == (128 << 20, 64 << 20)


def test_memory_limit_that_leaves_no_room_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(IsolationUnavailable, match="at least 80 MiB"):
        body(SandboxSpec(limits=Limits(memory_bytes=SMALLEST_BYTES - 1)))


def test_nonce_is_nowhere_in_what_the_engine_is_told() -> None:
    nonce = OWNER.nonce(IDENTITY.sandbox_id)
    assert config(SandboxSpec())["nonce"] == nonce
    assert nonce not in json.dumps(body(SandboxSpec()))


def test_labels_lead_back_to_the_handle() -> None:
    handle = handle_of("c" * 64, labels(OWNER, IDENTITY))
    assert (handle.key, handle.sandbox_id, handle.workspace) == ("k-1", "a" * 32, "w-1")
    assert handle.created_at == IDENTITY.created_at
    assert handle.instance == "c" * 64


@pytest.mark.parametrize("change", [{f"{LABEL}created": "soon"}, {f"{LABEL}key": None}])
def test_container_whose_labels_make_no_sense_is_not_taken_for_ours(change: dict[str, str | None]) -> None:
    found = {key: value for key, value in (labels(OWNER, IDENTITY) | change).items() if value is not None}
    with pytest.raises((KeyError, ValueError)):
        handle_of("c" * 64, found)


def test_names_of_two_owners_never_meet() -> None:
    other = Owner("fedcba9876543210", b"x")
    assert container_name(OWNER, "k-1") != container_name(other, "k-1")


def test_attached_container_keeps_no_log_of_what_user_code_prints() -> None:
    host = body(SandboxSpec(), Place(PLACE.agent, PLACE.data, None))["HostConfig"]
    assert isinstance(host, dict)
    assert host["LogConfig"] == {"Type": "none", "Config": {}}
    assert not [mount for mount in host["Mounts"] if "/run/toolhost" in mount["Target"]]


def test_process_limit_is_held_by_the_control_group_or_by_the_kernel_inside() -> None:
    spec = SandboxSpec(limits=Limits(processes=100))
    shared, own = config(spec)["limits"], config(spec, own_kernel=True)["limits"]
    assert isinstance(shared, dict)
    assert isinstance(own, dict)
    assert (shared["processes"], own["processes"]) == (None, 100)
    hosts = [body(spec, own_kernel=own)["HostConfig"] for own in (False, True)]
    assert [host["PidsLimit"] for host in hosts if isinstance(host, dict)] == [108, 912]


def test_environment_too_large_for_the_configuration_is_refused() -> None:
    with pytest.raises(IsolationUnavailable, match="too large"):
        config(SandboxSpec(environment={"X": "x" * 100_000}))


def test_callers_environment_wins_over_ours_and_over_the_images() -> None:
    environment = config(SandboxSpec(environment={"HOME": "/x", "PATH": "/y", "A": "b"}))["environment"]
    assert isinstance(environment, dict)
    assert (environment["HOME"], environment["PATH"], environment["A"]) == ("/x", "/y", "b")
