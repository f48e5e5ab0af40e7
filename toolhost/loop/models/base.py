"""The contract between the driver and a model's wire.

Above: the driver calls `ModelClient.round` once for each round and reads fragments until `RoundEnd`. Below: one
adapter a wire. An adapter assembles by index and id, never by arrival; streaming and not, it yields the same whole.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from toolhost.loop.errors import ModelError
from toolhost.loop.transcript import Item

Stop = Literal["stop", "calls", "length", "filter", "truncated"]
"""Why a round ended: the model was done, wants calls answered, ran out of tokens, was filtered, or its stream just
stopped without saying why."""


@dataclass(frozen=True, slots=True)
class ModelTool:
    """A function as the model is offered it. `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One round's request.

    `items` is a paired transcript (`transcript.paired`). `tool_choice` is auto, none, required or a tool's name.
    `options` are further fields for the wire, already in the Responses API's names (`temperature`, `top_p`, `text`,
    `reasoning`); an adapter takes what its wire has.
    """

    model: str
    items: Sequence[Item]
    instructions: str | None = None
    tools: Sequence[ModelTool] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    stream: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningReplay:
    """What the upstream wants back with the reasoning just ended (a signature, encrypted content, a field's name)."""

    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RefusalDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A fragment of the call number `key` (counted by the adapter). Empty strings add nothing."""

    key: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one round, or of all."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def as_response_usage(self) -> dict[str, Any]:
        """In the shape of the Responses API."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


@dataclass(frozen=True, slots=True)
class RoundEnd:
    stop: Stop
    usage: Usage = Usage()


ModelDelta = TextDelta | ReasoningDelta | ReasoningReplay | RefusalDelta | CallDelta | RoundEnd


def well_formed(deltas: Iterable[ModelDelta]) -> Iterator[ModelDelta]:
    """The fragments that an adapter reads from a piece of an answer, which may be of any form.

    Raises ModelError where the piece, or a text in it, is not of the form that its API has.
    """
    try:
        for delta in deltas:
            if not isinstance(delta, (RoundEnd, ReasoningReplay)):
                for one in fields(delta):
                    if one.name != "key" and not isinstance(getattr(delta, one.name), str):
                        raise TypeError(f"{one.name} is no text")
            yield delta
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the model server's answer is not of its API's form ({error})") from error


def tokens(count: Any) -> int:
    """A count of tokens as a server tells it; what is none counts nothing."""
    return int(count) if isinstance(count, int) and count > 0 else 0


class ModelClient(Protocol):
    """A model behind one wire."""

    dialect: str

    def round(self, request: ModelRequest) -> AsyncGenerator[ModelDelta, None]:
        """The fragments of one round, the last one a `RoundEnd`.

        Cancelling the iteration closes the connection, which is how model servers are told to stop. Raises ModelError.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...
