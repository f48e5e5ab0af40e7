"""What a run is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from openai.types.responses import Response

from toolhost.loop.errors import RequestError
from toolhost.loop.output_items import Event
from toolhost.loop.tools import ClientFunction, Namespace, Toolbox
from toolhost.loop.trace import Trace
from toolhost.loop.transcript import Item

ALLOW_HEADER = "x-toolhost-allow-domains"
INCLUDE_CODE_OUTPUTS = "code_interpreter_call.outputs"

_SEARCH_TYPES = ("web_search", "web_search_preview")
_LABELS: dict[str, tuple[Any, Literal["code", "search", "mcp"]]] = {
    "code_interpreter": ("python", "code"),
    "web_search_preview": ("browser", "search"),
}
"""Labels under which vLLM lets a request address its built-in namespaces (with headers, for instance)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a run. Times are seconds.

    `max_tool_calls` is shared by all hosted tools; at the bound they are no longer offered and the model answers.
    `max_unknown` is how many calls to tools that do not exist are answered with an error before the run fails.
    `max_attempts` bounds the attempts of a call that may be tried again. `excerpt` is the number of characters of a
    tool's output that the model is shown; the whole is in the trace.
    """

    max_rounds: int = 20
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    deadline: float | None = None
    call_timeout: float = 150.0
    max_unknown: int = 2
    max_attempts: int = 2
    excerpt: int = 20_000


@dataclass(frozen=True, slots=True)
class LoopRequest:
    """One run.

    `input` is this turn's, `history` what came before it, both as items. `tools` are in the Responses API's shape:
    `function` (the application answers), `code_interpreter` (namespace python), `web_search` (browser) and `mcp` (the
    namespace of its `server_label`). `principal` is who the caller has established to be asking; nothing a model or
    user writes changes it. `response_id` names the task; one is minted if it is missing. `session` is the key of the
    tools' sessions (the response id if missing), `headers` are sent along with it. `stream` is how the model is asked;
    the events are the same. `options` go to the model (`temperature`, `reasoning`, `text`, …), `fields` only into the
    response object (`metadata`, `previous_response_id`, …).
    """

    model: str
    input: str | Sequence[Mapping[str, Any]]
    history: Sequence[Mapping[str, Any]] = ()
    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    limits: Limits = field(default_factory=Limits)
    principal: str = "local"
    response_id: str | None = None
    session: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: bool = True
    include: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pending:
    """Something that waits for the application: it, not the response's status, decides what to do next."""

    kind: Literal["function_call", "approval"]
    id: str
    """The call id of a function call, the id of an approval request."""
    name: str
    arguments: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class LoopResult:
    """A finished run.

    `transcript` is what the model saw and said, this run included: the next turn's `history`. `why` is the reason of
    the ending in one word (`answer`, `client_calls`, `approval`, `refusal`, `max_output_tokens`, `content_filter`,
    `truncated`, `round_limit`, `unknown_tool`, `deadline`, `cancelled`, `model_error`, `error`).
    """

    response: Response
    pending: tuple[Pending, ...]
    transcript: tuple[Item, ...]
    trace: Trace
    why: str


class Observer(Protocol):
    """Who follows a run. Both methods are awaited in order: what they store is stored before the run goes on."""

    async def events(self, events: Sequence[Event]) -> None:
        """The next events, at least one, before anyone else sees them."""
        ...

    async def checkpoint(self, transcript: Sequence[Item]) -> None:
        """About to run a tool that may change something: the transcript with its call, whose output is not known."""
        ...


def resolve_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[Namespace], list[ClientFunction]]:
    """A request's tools as namespaces and client functions. Raises RequestError."""
    namespaces: dict[str, Namespace] = {}
    functions: dict[str, ClientFunction] = {}
    for tool in tools:
        match tool.get("type"):
            case "function":
                functions[tool["name"]] = ClientFunction(
                    tool["name"],
                    tool.get("description") or "",
                    tool.get("parameters") or {"type": "object", "properties": {}},
                    tool.get("strict"),
                )
            case "code_interpreter":
                _name_once(namespaces, Namespace("python", "code"))
            case kind if kind in _SEARCH_TYPES:
                _name_once(namespaces, Namespace("browser", "search", headers=_domains(tool)))
            case "mcp":
                _name_once(namespaces, _mcp_namespace(tool))
            case other:
                raise RequestError(f"tools of type {other!r} are not supported", "tools")
    return list(namespaces.values()), list(functions.values())


def _name_once(namespaces: dict[str, Namespace], new: Namespace) -> None:
    """Add a namespace. Raises RequestError where it is there with limits that would then not hold."""
    before = namespaces.get(new.name, new)
    if before != Namespace(before.name, before.kind) and replace(before, kind=new.kind) != new:
        raise RequestError(f"tools: {new.name!r} is named twice, with different limits or headers", "tools")
    namespaces[new.name] = new


def resolve_choice(choice: str | Mapping[str, Any], toolbox: Toolbox) -> str:
    """A request's `tool_choice` as auto, none, required or the name of an offered tool. Raises RequestError."""
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise RequestError("tool_choice must be auto, none, required or an object", "tool_choice")
        return choice
    namespace = {"code_interpreter": "python", **dict.fromkeys(_SEARCH_TYPES, "browser")}.get(choice.get("type", ""))
    names: list[str] = []
    match choice.get("type"):
        case "function" if choice.get("name") in toolbox.functions:
            return str(choice["name"])
        case "mcp":
            wanted = (choice.get("server_label"), choice.get("name"))
            names = [name for key, name in toolbox.names.items() if wanted in (key, (key[0], None))]
        case _ if namespace:
            names = [name for key, name in toolbox.names.items() if key[0] == namespace]
        case other if other not in ("function", "mcp"):
            raise RequestError(f"tool_choice of type {str(other)[:64]!r} is not supported", "tool_choice")
    if not names:
        raise RequestError(f"tool_choice names a tool that is not among the tools: {dict(choice)}", "tool_choice")
    return names[0] if len(names) == 1 else "required"


def _mcp_namespace(tool: Mapping[str, Any]) -> Namespace:
    label = tool.get("server_label")
    label, kind = _LABELS.get(str(label), (label, "mcp"))
    if not isinstance(label, str) or not label:
        raise RequestError("an mcp tool needs a server_label", "tools")
    given = tool.get("allowed_tools")
    rule = given if isinstance(given, Mapping) else {"tool_names": given}
    allowed = rule.get("tool_names")
    approval: Literal["always", "never"] | frozenset[str] = "never"
    exempt: frozenset[str] = frozenset()
    match tool.get("require_approval"):
        case "always":
            approval = "always"
        case {"never": {"tool_names": [*names]}, "always": {"tool_names": [*asked]}}:
            approval, exempt = "always", frozenset(names).difference(asked)
        case {"never": {"tool_names": [*names]}}:
            approval, exempt = "always", frozenset(names)  # what is not named there is asked for
        case {"always": {"tool_names": [*names]}}:
            approval = frozenset(names)
    return Namespace(
        label,
        kind,
        approval,
        exempt,
        None if allowed is None else frozenset(allowed),
        bool(rule.get("read_only")),
        dict(tool.get("headers") or {}),
    )


def _domains(tool: Mapping[str, Any]) -> dict[str, str]:
    """The domains that a search is narrowed to, as a tool host is told of them."""
    allowed = (tool.get("filters") or {}).get("allowed_domains")
    try:
        plain = [one if one.isascii() else one.encode("idna").decode() for one in allowed or ()]
    except UnicodeError:
        raise RequestError("tools: allowed_domains has a name that no host can have", "tools") from None
    return {ALLOW_HEADER: ",".join(plain)} if plain else {}
