"""A gateway from settings.

Above: `services`, the `gateway` command. Below: all rooms of this package.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import httpx2

from toolhost.config import GatewaySettings
from toolhost.errors import ConfigurationError
from toolhost.gateway.counts import Counts
from toolhost.gateway.errors import ApiError
from toolhost.gateway.sealing import Sealer
from toolhost.gateway.service import Gateway, Parts
from toolhost.gateway.sources import CitationSource, FileSource, citations_for, source_for
from toolhost.gateway.stores import registry
from toolhost.loop.errors import RequestError, ToolServerGone
from toolhost.loop.models.registry import connect
from toolhost.loop.tool_client import McpToolServer
from toolhost.loop.tools import ToolServer, ToolServerFactory

MODELS_S = 15.0


def assemble(
    settings: GatewaySettings,
    state_dir: Path,
    tools: ToolServer | ToolServerFactory,
    files: FileSource | None = None,
    citations: CitationSource | None = None,
    counts: Counts | None = None,
) -> Gateway:
    """A gateway over these tools; not yet open. `files`, `citations` None: the settings' tool hosts have them.

    Raises ConfigurationError.
    """
    if settings.model_url is None:
        raise ConfigurationError("give --model-url URL, the model server up to /v1")
    key = _key(settings.api_key_file)
    sealer = Sealer.load(settings.keys_file or state_dir / "gateway.keys", make=settings.keys_file is None)
    try:
        model = connect(settings.dialect, settings.model_url, key)
    except RequestError as error:
        raise ConfigurationError(str(error)) from error
    return Gateway(
        Parts(
            settings=settings,
            store=registry.create(settings.store, state_dir),
            model=model,
            tools=tools,
            sealer=sealer,
            worker=f"gw_{secrets.token_hex(8)}",
            catalogue=Catalogue(settings.model_url, key),
            files=files or source_for(settings.tools),
            citations=citations or citations_for(settings.tools),
            counts=counts or Counts(),
        )
    )


async def connect_tools(settings: GatewaySettings) -> ToolServer:
    """The tool servers of the settings, listed once. Raises ConfigurationError if one cannot be reached."""
    try:
        return await McpToolServer.connect(settings.tools)
    except (RequestError, ToolServerGone) as error:
        raise ConfigurationError(f"a tool server cannot be used: {error}") from error


class Catalogue:
    """The models that the model server has."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = f"{url.rstrip('/')}/models"
        self._headers = {"Authorization": f"Bearer {key}", "x-api-key": key} if key else {}

    async def models(self) -> list[dict[str, Any]]:
        """As OpenAI lists them. Raises ApiError 502."""
        try:
            async with httpx2.AsyncClient(headers=self._headers, timeout=MODELS_S) as http:
                data = (await http.get(self._url)).raise_for_status().json()["data"]
            return [
                {
                    "created": 0,
                    "owned_by": "unknown",
                    **{key: model[key] for key in ("created", "owned_by") if model.get(key) is not None},
                    "id": str(model["id"]),
                    "object": "model",
                }
                for model in data
            ]
        except (httpx2.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ApiError(502, f"the model server does not list its models: {error}") from error


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the model server's key: {error}") from None
