"""A scripted model server that speaks Chat Completions, Responses and Anthropic Messages on a real socket.

    python -m toolhost.loop.fake_model script.json --port 8001

The script is a list of rounds (`ScriptedRound`); each request is answered by the next one that fits. For tests,
examples and load runs: it streams fragments, parallel calls, garbage arguments, made-up names, slow and broken
replies, and it
keeps what it was sent. Wire formats are in `fake_wire`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from pydantic import BaseModel, ConfigDict, TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from toolhost.loop.fake_wire import WIRES, Answer, Fragment, last_user_text


class ScriptedCall(BaseModel):
    """A tool call; `arguments` as text is sent as it is, valid or not. Ids repeat from round to round, as real ones."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] | str = ""
    id: str | None = None


class ScriptedRound(BaseModel):
    """One answer.

    `chunk` is the characters in a fragment, `delay` the seconds before each. `interleave` alternates the fragments of
    parallel calls. `pause` names a gate at which the answer waits before fragment `pause_at`. `break_after` cuts the
    connection after so many fragments; `finish` "none" ends the stream without saying why. `when` is a pattern that the
    last user message must match; `keep` lets the round answer more than one request.
    """

    model_config = ConfigDict(extra="forbid")

    reasoning: str = ""
    text: str = ""
    calls: list[ScriptedCall] = []
    finish: str = ""
    status: int = 200
    code: str = ""
    garbage: str = ""
    chunk: int = 8
    delay: float = 0.0
    interleave: bool = False
    pause: str = ""
    pause_at: int = 0
    break_after: int | None = None
    when: str = ""
    keep: bool = False
    input_tokens: int = 10
    output_tokens: int = 5

    def answer(self, model: str) -> Answer:
        finish = self.finish or ("calls" if self.calls else "stop")
        return Answer(list(self._fragments()), finish, model, self.input_tokens, self.output_tokens)

    def _fragments(self) -> Iterator[Fragment]:
        yield from (Fragment("reasoning", text=part) for part in self._cut(self.reasoning))
        yield from (Fragment("text", text=part) for part in self._cut(self.text))
        streams = [list(self._call(index, call)) for index, call in enumerate(self.calls)]
        if not self.interleave:
            yield from (fragment for stream in streams for fragment in stream)
            return
        for turn in range(max((len(stream) for stream in streams), default=0)):
            yield from (stream[turn] for stream in streams if turn < len(stream))

    def _call(self, index: int, call: ScriptedCall) -> Iterator[Fragment]:
        text = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
        yield Fragment("call", index=index, call_id=call.id or f"call_{index}", name=call.name)
        yield from (Fragment("call", index=index, text=part) for part in self._cut(text))

    def _cut(self, text: str) -> Iterator[str]:
        yield from (text[start : start + self.chunk] for start in range(0, len(text), self.chunk))


Script = TypeAdapter(list[ScriptedRound])


@dataclass
class FakeModel:
    """The server's state: the rounds to come, the requests that came, and the gates of paused answers."""

    rounds: list[ScriptedRound]
    requests: list[dict[str, Any]] = field(default_factory=list)
    disconnects: int = 0
    """Answers that their client did not wait for."""

    def __post_init__(self) -> None:
        self._gates: dict[str, asyncio.Event] = {}
        self._reached: dict[str, asyncio.Event] = {}
        self._left = asyncio.Event()

    def release(self, gate: str) -> None:
        """Let the answers that wait at a gate go on."""
        self._event(self._gates, gate).set()

    async def reached(self, gate: str) -> None:
        """Wait until an answer has come to a gate."""
        await self._event(self._reached, gate).wait()

    async def left(self) -> None:
        """Wait until a client has gone before its answer's end."""
        await self._left.wait()

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [Route(f"/v1{path}", self._answer, methods=["POST"]) for path in WIRES]
        return Starlette(routes=[*routes, Route("/v1/models", self._models)])

    @staticmethod
    def _event(events: dict[str, asyncio.Event], name: str) -> asyncio.Event:
        return events.setdefault(name, asyncio.Event())

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "toolhost"}]})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        wire = WIRES[request.url.path.removeprefix("/v1")]
        self.requests.append(body)
        scripted = self._next(last_user_text(body))
        if scripted is None:
            return JSONResponse({"error": {"message": "the script has no round for this request"}}, 500)
        if scripted.status != 200:
            error = {"message": scripted.text or "scripted failure", "code": scripted.code or None}
            return JSONResponse({"error": error}, scripted.status)
        answer = scripted.answer(str(body.get("model")))
        if body.get("stream"):
            return StreamingResponse(self._stream(scripted, wire.stream(answer)), media_type="text/event-stream")
        if scripted.pause:
            await self._wait(scripted.pause)
        if scripted.garbage:
            return Response(scripted.garbage, media_type="application/json")
        return JSONResponse(wire.whole(answer))

    def _next(self, text: str) -> ScriptedRound | None:
        for scripted in self.rounds:
            if re.search(scripted.when, text):
                if not scripted.keep:
                    self.rounds.remove(scripted)
                return scripted
        return None

    async def _wait(self, gate: str) -> None:
        self._event(self._reached, gate).set()
        await self._event(self._gates, gate).wait()

    async def _stream(self, scripted: ScriptedRound, frames: Sequence[tuple[bool, str]]) -> AsyncIterator[str]:
        """Frames of a stream; each says whether it is a fragment, for the counts of pauses and breaks."""
        sent = 0
        try:
            for is_fragment, frame in frames:
                if is_fragment:
                    if scripted.break_after is not None and sent >= scripted.break_after:
                        raise ConnectionAbortedError("scripted break")
                    if scripted.pause and sent == scripted.pause_at:
                        await self._wait(scripted.pause)
                    if scripted.delay:
                        await asyncio.sleep(scripted.delay)
                    sent += 1
                yield frame
            if scripted.garbage:
                yield f"data: {scripted.garbage}\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.disconnects += 1
            self._left.set()
            raise


@asynccontextmanager
async def serving(
    rounds: Sequence[ScriptedRound | dict[str, Any]], port: int = 0
) -> AsyncIterator[tuple[FakeModel, str]]:
    """The server on loopback in this event loop, with its base URL."""
    model = FakeModel(Script.validate_python(list(rounds)))
    config = uvicorn.Config(model.app(), host="127.0.0.1", port=port, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    task = asyncio.create_task(server.serve([socket]))
    try:
        yield model, f"http://127.0.0.1:{socket.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task
        socket.close()


def main(
    script: Annotated[Path, typer.Argument(help="JSON file: a list of rounds.", exists=True, dir_okay=False)],
    port: Annotated[int, typer.Option(help="Port on the loopback interface.")] = 8001,
) -> None:
    """Serve a scripted model on loopback until interrupted."""
    model = FakeModel(Script.validate_json(script.read_bytes()))
    uvicorn.run(model.app(), host="127.0.0.1", port=port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    typer.run(main)
