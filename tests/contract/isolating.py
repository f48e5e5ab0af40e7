"""The backends that isolate: parameters of the suites that run hostile code."""

import pytest

ISOLATING = [
    pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("docker-runsc", marks=pytest.mark.runsc),
]
