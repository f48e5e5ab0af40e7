"""Stores by name, loaded late."""

from __future__ import annotations

import importlib

from sandboxes.stores.base import Store

STORES = {
    "sqlite": "sandboxes.stores.sqlite:SqliteStore",
    "redis": "sandboxes.stores.redis:RedisStore",
    "memory": "sandboxes.stores.memory:MemoryStore",
}


def store_class(name: str) -> type[Store]:
    """The class of a store. Raises ValueError naming the known ones."""
    try:
        module, _, attribute = STORES[name].partition(":")
    except KeyError:
        raise ValueError(f"unknown store {name!r}; known: {', '.join(sorted(STORES))}") from None
    found: type[Store] = getattr(importlib.import_module(module), attribute)
    return found
