"""The backends that isolate: parameters of the suites that run hostile code."""

import os

import pytest

from tests.sandboxes.backends.ray_host import DIRECTORY

ISOLATING = [
    pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("docker-runsc", marks=pytest.mark.runsc),
    *(["ray"] if DIRECTORY in os.environ else []),  # see tests/cluster/test_ray_backend.py
]
