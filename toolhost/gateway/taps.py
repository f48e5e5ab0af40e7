"""What one run puts around the model and the tools: to see what they say beside the text, and to add it.

Above: `service`. Below: `toolhost.loop`. Reasoning: what the upstream wants back with it, for sealing. Images: those in
tool output are shown to a model that has eyes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from toolhost.loop.errors import ModelError
from toolhost.loop.ledger import CallRegistry
from toolhost.loop.models.base import ModelClient, ModelDelta, ModelRequest, ReasoningDelta, ReasoningReplay
from toolhost.loop.results import read_result
from toolhost.loop.tools import AttemptSession, ToolServer
from toolhost.loop.transcript import Item

MAX_IMAGES = 4
"""Images of one call that the model is shown."""
SHOWN = "Images in the output of the call above:"


class TapModel:
    """A model client of one run that notes what belongs to each thought, and shows the model the tools' images.

    `answered` is set once the model has begun its first answer; `refusal` is there if it gave none.
    """

    def __init__(self, model: ModelClient, images: ToolImages) -> None:
        self.dialect = model.dialect
        self._model = model
        self._images = images
        self._replays: dict[str, dict[str, Any]] = {}
        self.answered = asyncio.Event()
        self.refusal: ModelError | None = None

    async def aclose(self) -> None:
        """The client is shared: whoever made it closes it."""

    async def round(self, request: ModelRequest) -> AsyncGenerator[ModelDelta, None]:
        request = replace(request, items=await self._images.shown(request.items, self.dialect))
        thought = ""
        try:
            async with aclosing(self._model.round(request)) as deltas:
                async for delta in deltas:
                    self.answered.set()
                    if isinstance(delta, ReasoningDelta):
                        thought += delta.text
                    elif isinstance(delta, ReasoningReplay):
                        self._replays[thought] = dict(delta.data)
                        thought = ""
                    yield delta
        except ModelError as error:
            if not self.answered.is_set():
                self.refusal = error
            raise
        finally:
            self.answered.set()

    def replay_of(self, thought: str) -> dict[str, Any]:
        """What the upstream wants back with a thought; empty if it said nothing."""
        return self._replays.get(thought, {})


class ToolImages:
    """The images that calls of one run came with, by attempt."""

    def __init__(self, registry: CallRegistry, wanted: bool) -> None:
        self._registry = registry
        self._wanted = wanted
        self._by_attempt: dict[str, tuple[str, ...]] = {}

    def note(self, attempt: str, result: Any) -> None:
        if self._wanted and (images := read_result(result).images[:MAX_IMAGES]):
            self._by_attempt[attempt] = images

    async def shown(self, items: Sequence[Item], dialect: str) -> list[Item]:
        """Items with the images of their calls. Chat Completions has no place for them in a tool's message, so they
        follow in one of the user's."""
        if not self._by_attempt:
            return list(items)
        images = await self._by_call()
        result: list[Item] = []
        waiting: list[str] = []
        for item in items:
            if item["type"] != "function_call_output":
                result += _message(waiting)
                waiting = []
                result.append(item)
                continue
            found = images.get(item["call_id"], ()) if isinstance(item["output"], str) else ()
            if found and dialect != "chat":
                parts = [{"type": "input_text", "text": item["output"]}, *(_part(url) for url in found)]
                result.append({**item, "output": parts})
            else:
                result.append(item)
                waiting += found
        return result + _message(waiting)

    async def _by_call(self) -> Mapping[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for attempt, images in list(self._by_attempt.items()):
            record = await self._registry.call_of_attempt(attempt)
            if record is not None and record.usable:
                found[record.call_id] = images
        return found


class RunTaps:
    """The taps of one run, for its observer. `seal` is None where reasoning does not travel."""

    def __init__(self, model: TapModel, images: ToolImages, seal: Callable[[Mapping[str, Any]], str] | None) -> None:
        self._model = model
        self._images = images
        self._seal = seal
        self._sealed: dict[str, str] = {}

    def dressed(self, item: Item) -> Item:
        """A finished reasoning item gets its `encrypted_content`, the same each time."""
        if self._seal is None or item["type"] != "reasoning" or item.get("status") == "in_progress":
            return item
        if item["id"] not in self._sealed:
            content = item.get("content") or []
            thought = "".join(part["text"] for part in content)
            self._sealed[item["id"]] = self._seal({"content": content, "replay": self._model.replay_of(thought)})
        return {**item, "encrypted_content": self._sealed[item["id"]]}

    async def shown(self, items: Sequence[Item]) -> list[Item]:
        return await self._images.shown(items, self._model.dialect)

    @property
    def answered(self) -> asyncio.Event:
        return self._model.answered

    @property
    def refusal(self) -> ModelError | None:
        return self._model.refusal


class RunTools:
    """The tool server of one run: the host's namespaces and the remote servers that its request names.

    Only the host's own namespaces are told the session's key: elsewhere it would be a secret given away.
    """

    def __init__(self, own: ToolServer, remote: Mapping[str, ToolServer], images: ToolImages) -> None:
        self._own = own
        self._remote = remote
        self._images = images

    def has_tool(self, name: str) -> bool:
        return self._server(name).has_tool(name)

    def get_tool_description(self, name: str, allowed_tools: list[str] | None = None) -> Any:
        return self._server(name).get_tool_description(name, allowed_tools)

    def new_session(
        self, name: str, session_id: str, headers: dict[str, str] | None = None
    ) -> AbstractAsyncContextManager[Any]:
        if name in self._remote:
            return self._remote[name].new_session(name, session_id, None)
        return self._session(name, session_id, headers)

    @asynccontextmanager
    async def _session(self, name: str, session_id: str, headers: dict[str, str] | None) -> AsyncIterator[Any]:
        async with self._own.new_session(name, session_id, headers) as session:
            yield _Seen(session, self._images) if isinstance(session, AttemptSession) else session

    def _server(self, name: str) -> ToolServer:
        return self._remote.get(name, self._own)


class _Seen:
    """A session whose results are looked at for images."""

    def __init__(self, session: Any, images: ToolImages) -> None:
        self._session = session
        self._images = images

    async def call_tool(self, name: str, args: dict[str, Any]) -> Any:
        return await self._session.call_tool(name, args)

    async def call_attempt(self, name: str, args: dict[str, Any], attempt: str) -> Any:
        result = await self._session.call_attempt(name, args, attempt)
        self._images.note(attempt, result)
        return result

    @property
    def _client_info(self) -> Any:
        return self._session._client_info


def _part(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def _message(images: Sequence[str]) -> list[Item]:
    if not images:
        return []
    content = [{"type": "input_text", "text": SHOWN}, *(_part(url) for url in images)]
    return [{"type": "message", "role": "user", "content": content}]
