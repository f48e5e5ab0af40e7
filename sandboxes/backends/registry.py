"""Backends by name, loaded late: an engine's client library costs nothing to who does not use it."""

from __future__ import annotations

import importlib

from sandboxes.backends.base import Backend

BACKENDS = {
    "bubblewrap": "sandboxes.backends.bubblewrap:BubblewrapBackend",
    "docker": "sandboxes.backends.docker:DockerBackend",
    "ray": "sandboxes.backends.ray:RayBackend",
}


def backend_class(name: str) -> type[Backend]:
    """The class of a backend. Raises ValueError naming the known ones."""
    try:
        module, _, attribute = BACKENDS[name].partition(":")
    except KeyError:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(sorted(BACKENDS))}") from None
    found: type[Backend] = getattr(importlib.import_module(module), attribute)
    return found
