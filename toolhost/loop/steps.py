"""The loop's decisions, pure: what to ask the model, what to do with its calls, when to end.

`driver` performs what is decided here. No I/O and no clock: deadlines and cancels are the performer's events.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from toolhost.loop.models.base import Stop
from toolhost.loop.request import Limits
from toolhost.loop.tools import ClientFunction, HostedTool, Toolbox


@dataclass(frozen=True, slots=True)
class State:
    """Where a run is: rounds done, hosted calls executed, calls to unknown tools, tokens the model put out."""

    rounds: int = 0
    tool_calls: int = 0
    unknown: int = 0
    output_tokens: int = 0
    last: bool = False
    """The round just asked for is the last one, without tools."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the model for a round."""

    hosted: bool
    tools: bool
    tool_choice: str
    max_output_tokens: int | None


@dataclass(frozen=True, slots=True)
class End:
    """End the run."""

    ending: Literal["completed", "incomplete", "failed", "cancelled"]
    why: str
    reason: Literal["max_output_tokens", "content_filter"] | None = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call as the model made it, under the id that the loop gave it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class HostedCall:
    """A call to run here."""

    call: ModelCall
    tool: HostedTool
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A call that goes back to the model with `text`; it is not executed."""

    call: ModelCall
    why: Literal["unknown", "broken", "budget"]
    text: str


@dataclass(frozen=True, slots=True)
class Split:
    """The calls of a round by what becomes of them, each list in call order."""

    hosted: list[HostedCall] = field(default_factory=list)
    approval: list[HostedCall] = field(default_factory=list)
    client: list[ModelCall] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A round as it came back."""

    stop: Stop
    has_text: bool
    calls: Sequence[ModelCall] = ()
    output_tokens: int = 0
    refused: bool = False


def plan(state: State, limits: Limits, tool_choice: str) -> Ask | End:
    """The next round. `tool_choice` counts for the first one only: forced for ever, a model never answers."""
    left = None if limits.max_output_tokens is None else limits.max_output_tokens - state.output_tokens
    if left is not None and left <= 0:
        return End("incomplete", "max_output_tokens", "max_output_tokens")
    if state.rounds >= limits.max_rounds:
        return Ask(hosted=False, tools=False, tool_choice="none", max_output_tokens=left)
    hosted = limits.max_tool_calls is None or state.tool_calls < limits.max_tool_calls
    choice = tool_choice if state.rounds == 0 else "auto"
    return Ask(hosted, True, choice, left)


def asked(state: State, ask: Ask) -> State:
    return replace(state, last=not ask.tools)


def after_model(state: State, outcome: Outcome) -> End | None:
    """Whether the round ends the run; None: its calls are to be split and acted on."""
    if outcome.refused:
        return End("completed", "refusal")
    match outcome.stop:
        case "length":
            return End("incomplete", "max_output_tokens", "max_output_tokens")
        case "filter":
            return End("incomplete", "content_filter", "content_filter")
        case "truncated":
            return End("incomplete", "truncated", "max_output_tokens")
    if state.last and (outcome.calls or not outcome.has_text):
        # The enumeration of reasons has none for rounds; this is the nearest.
        return End("incomplete", "round_limit", "max_output_tokens")
    return None if outcome.calls else End("completed", "answer")


def counted(state: State, outcome: Outcome) -> State:
    """The state after a round."""
    return replace(state, rounds=state.rounds + 1, output_tokens=state.output_tokens + outcome.output_tokens)


def split(calls: Sequence[ModelCall], toolbox: Toolbox, state: State, limits: Limits) -> Split:
    """Sort a round's calls: hosted, for approval, for the client, or back to the model."""
    result = Split()
    left = None if limits.max_tool_calls is None else max(0, limits.max_tool_calls - state.tool_calls)
    for call in calls:
        route = toolbox.route(call.name)
        arguments = parse_arguments(call.arguments)
        if route is None:
            result.rejected.append(Rejected(call, "unknown", _unknown(call.name, toolbox)))
        elif isinstance(arguments, str):
            result.rejected.append(Rejected(call, "broken", arguments))
        elif isinstance(route, ClientFunction):
            result.client.append(call)
        elif left is not None and len(result.hosted) + len(result.approval) >= left:
            text = f"The limit of {limits.max_tool_calls} tool calls is reached; answer with what you have."
            result.rejected.append(Rejected(call, "budget", text))
        elif toolbox.namespaces[route.namespace].needs_approval(route.name):
            result.approval.append(HostedCall(call, route, arguments))
        else:
            result.hosted.append(HostedCall(call, route, arguments))
    return result


def acted(state: State, parts: Split) -> State:
    """The state after a round's calls."""
    unknown = sum(one.why == "unknown" for one in parts.rejected)
    return replace(state, tool_calls=state.tool_calls + len(parts.hosted), unknown=state.unknown + unknown)


def after_calls(state: State, parts: Split, limits: Limits) -> End | None:
    """Whether the run ends once a round's calls are done; None: the model goes on."""
    if state.unknown > limits.max_unknown:
        names = ", ".join(sorted({one.call.name[:64] for one in parts.rejected if one.why == "unknown"}))
        message = f"the model kept calling tools that do not exist ({names or 'several'})"
        return End("failed", "unknown_tool", error=("server_error", message))
    if parts.approval:
        return End("completed", "approval")
    if parts.client:
        return End("completed", "client_calls")
    return None


def parse_arguments(text: str) -> dict[str, Any] | str:
    """A call's arguments as an object, or the text that tells the model what is wrong. Empty text is no arguments."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # as a tool's client will have to
    except UnicodeEncodeError:
        return "The arguments hold characters that are no text (half of a surrogate pair). The call was not executed."
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, ValueError) else "nested too deeply"
        shown = text if len(text) <= 200 else f"{text[:200]}…"
        return f"The arguments are not valid JSON ({detail}). The call was not executed. They were: {shown}"
    if not isinstance(value, dict):
        return "The arguments must be a JSON object. The call was not executed."
    return value


def _unknown(name: str, toolbox: Toolbox) -> str:
    names = ", ".join(tool.name for tool in toolbox.offered()) or "none"
    return f"There is no tool {name[:64]!r}. The tools are: {names}."
