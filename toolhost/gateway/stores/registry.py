"""The stores by the scheme of their URL, loaded when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from toolhost.errors import ConfigurationError
from toolhost.gateway.stores.base import Store

STORES: Mapping[str, str] = MappingProxyType(
    {
        "sqlite": "toolhost.gateway.stores.sqlite:SqliteStore",
        "redis": "toolhost.gateway.stores.redis:RedisStore",
        "rediss": "toolhost.gateway.stores.redis:RedisStore",
    }
)


def create(url: str | None, state_dir: Path) -> Store:
    """The store at `url` (`sqlite:///path`, `redis://host:port/0`); without one a file in the state directory.

    Raises ConfigurationError.
    """
    url = url or f"sqlite://{state_dir / 'gateway.sqlite'}"
    scheme = url.partition("://")[0]
    path = STORES.get(scheme)
    if path is None:
        raise ConfigurationError(f"gateway.store {url.split('@')[-1]!r} is none of {', '.join(STORES)}")
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigurationError(f"gateway.store {scheme} needs a package: pip install 'toolhost[gateway]'") from error
    store: Store = kind(url)
    return store
