"""The bodies that clients send, checked. What is wrong becomes a 400 that names the parameter.

Above: routes. Below: `errors`. Keys that this gateway does not know are accepted and ignored, as clients of later
versions send more; a known key with a wrong value never is.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from toolhost.gateway.errors import bad_request

MAX_ITEMS = 5000
"""Items of one input."""
MAX_CHARACTERS = 10_000_000
"""Of an input that is a text."""
MAX_TOOLS = 128

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Ident = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
IncludeKey = Literal[
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "computer_call_output.output.image_url",
]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ConversationRef(Body):
    id: Ident


class StreamOptions(Body):
    include_obfuscation: bool | None = None


class CreateResponse(Body):
    """The body of POST /v1/responses."""

    model: str = Field("", max_length=256)
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = Field(None, max_length=1_000_000)
    previous_response_id: Ident | None = None
    conversation: Ident | ConversationRef | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = Field(None, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[IncludeKey] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    background: bool = False
    store: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: Metadata = Field(default_factory=dict)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    safety_identifier: str | None = Field(None, max_length=64)
    prompt_cache_key: str | None = Field(None, max_length=512)
    user: str | None = Field(None, max_length=512)
    messages: None = None
    prompt: None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_for_null(cls, data: Any) -> Any:
        """A null means the default: clients send every key they know."""
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @field_validator("messages", "prompt", mode="before")
    @classmethod
    def _elsewhere(cls, value: Any, field: ValidationInfo) -> Any:
        """What would change the answer is not ignored as other unknown keys are."""
        if field.field_name == "messages":
            raise ValueError("the Responses API has no messages; give them as `input`")
        raise ValueError("prompt templates are not supported; give `instructions` and `input`")

    @field_validator("input", mode="before")
    @classmethod
    def _input(cls, value: Any) -> Any:
        """Before the union looks at it: its errors would be those of both branches."""
        if isinstance(value, str):
            if len(value) > MAX_CHARACTERS:
                raise ValueError(f"a text may have {MAX_CHARACTERS} characters, not {len(value)}")
        elif not isinstance(value, list):
            raise ValueError("must be a text or a list of items")
        elif len(value) > MAX_ITEMS:
            raise ValueError(f"there may be {MAX_ITEMS} items, not {len(value)}")
        for number, item in enumerate(value if isinstance(value, list) else ()):
            if not isinstance(item, dict):
                raise ValueError(f"item {number} is not an object")
        return value

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation

    @field_validator("text")
    @classmethod
    def _format(cls, value: dict[str, Any]) -> dict[str, Any]:
        form = value.get("format", {"type": "text"})
        if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
            raise ValueError("text.format.type must be text, json_object or json_schema")
        if form["type"] == "json_schema" and not (
            isinstance(form.get("schema"), dict) and isinstance(form.get("name"), str)
        ):
            raise ValueError("text.format of type json_schema needs a name and a schema")
        return value


class CreateConversation(Body):
    items: Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)] | None = None
    metadata: Metadata | None = None


class UpdateConversation(Body):
    metadata: Metadata = Field(default_factory=dict)


class CreateItems(Body):
    items: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_ITEMS)


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """A body as its type. Raises ApiError."""
    try:
        data = json.loads(raw or b"{}", parse_constant=_no_constant, parse_float=_finite)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_request("the body has half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> Exception:
    first = error.errors(include_url=False, include_input=False)[0]
    place = [str(part) for part in first["loc"] if not (isinstance(part, str) and _is_branch(part))]
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{'.'.join(place) or 'body'}: {message}", place[0] if place else None, "invalid_value")


def _is_branch(part: str) -> bool:
    """Names that pydantic puts into a path for the branches of a union."""
    return "[" in part or part in ("str", "ConversationRef")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")
