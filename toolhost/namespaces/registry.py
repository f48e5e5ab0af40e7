"""Namespaces by name, made late from settings: what one needs costs nothing to who does not serve it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from toolhost.config import Settings
from toolhost.errors import ConfigurationError
from toolhost.namespaces.base import Namespace

# Name to "module:factory"; a factory takes Settings. vLLM dispatches to python, browser and container only.
NAMESPACES: dict[str, str] = {
    "python": "toolhost.namespaces.registry:python",
    "browser": "toolhost.namespaces.registry:browser",
    "container": "toolhost.namespaces.registry:container",
}


def python(settings: Settings) -> Namespace:
    from toolhost.namespaces.python import PythonNamespace

    return PythonNamespace(settings.python)


def browser(settings: Settings) -> Namespace:
    from toolhost.browsing.service import BrowserService
    from toolhost.namespaces.browser import BrowserNamespace

    return BrowserNamespace(BrowserService(settings), instructions=settings.browser.instructions)


def container(settings: Settings) -> Namespace:
    from toolhost.namespaces.container import ContainerNamespace

    return ContainerNamespace(settings.python)


def create(settings: Settings) -> dict[str, Namespace]:
    """Every namespace, by name. Raises ConfigurationError when the root namespace is none of them."""
    made: dict[str, Namespace] = {}
    for name, place in NAMESPACES.items():
        module, _, attribute = place.partition(":")
        factory: Callable[[Settings], Namespace] = getattr(importlib.import_module(module), attribute)
        made[name] = factory(settings)
    if settings.server.root_namespace not in made:
        raise ConfigurationError(
            f"server.root_namespace is {settings.server.root_namespace!r}; namespaces are {', '.join(sorted(made))}"
        )
    return made
