"""The adapters by name, loaded when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from toolhost.loop.errors import RequestError
from toolhost.loop.models.base import ModelClient

ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "chat": "toolhost.loop.models.chat:ChatModel",
        "responses": "toolhost.loop.models.responses:ResponsesModel",
        "anthropic": "toolhost.loop.models.anthropic:AnthropicModel",
    }
)


def connect(dialect: str, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> ModelClient:
    """A client of the model server at `base_url`; `timeout` in seconds is between two bytes of an answer.

    Raises RequestError for a dialect that is not in `ADAPTERS`, or an address that is none.
    """
    path = ADAPTERS.get(dialect)
    if path is None:
        raise RequestError(f"unknown model dialect {dialect!r}; known are {', '.join(ADAPTERS)}", "model")
    module, _, name = path.partition(":")
    client: ModelClient = getattr(importlib.import_module(module), name)(base_url, api_key, timeout)
    return client
