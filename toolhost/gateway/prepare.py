"""A client's body to the loop's request: tools, history, session, and the fields of the object.

Above: `runs`. Below: `schema`, `items`, `conversations`, `toolhost.loop`. Nothing a client writes changes whose session
is used: headers of its tools may narrow, never name a session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolhost.config import DOMAIN, GatewaySettings
from toolhost.gateway.errors import bad_request
from toolhost.gateway.records import Item
from toolhost.gateway.schema import CreateResponse
from toolhost.loop.request import ALLOW_HEADER, Limits, LoopRequest

OWN_HEADER = "x-toolhost-session"
TTL_HEADER = "x-toolhost-ttl"
NARROWING = frozenset({ALLOW_HEADER, "x-toolhost-deny-domains"})
"""Headers that a client may send to the host's own namespaces."""
MAX_DOMAINS = 100
MAX_DOMAIN = 253  # characters that the name of a host may have

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SEARCHES = ("web_search", "web_search_preview")
_CODE_NAMES = ("code_interpreter", "python")
STATEFUL = frozenset({"python", "container"})
"""Namespaces whose state a conversation keeps in its session."""


@dataclass(frozen=True, slots=True)
class Session:
    """The session that a response's tools use: what clients see of it, and the host's key."""

    container_id: str
    key: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A response to be run: the client's body, its items as the loop reads them, and where it stands."""

    id: str
    principal: str
    body: CreateResponse
    fresh: Sequence[Item]
    history: Sequence[Sequence[Item]] = ()
    session: Session | None = None
    note: str = ""
    summary: str = ""
    summarized: int = 0
    """How many turns at the front of the history the summary stands for."""


def loop_request(asked: Asked, settings: GatewaySettings) -> LoopRequest:
    """The loop's request. Raises ApiError."""
    body = asked.body
    session = asked.session
    headers = {} if session is None else {OWN_HEADER: session.key, TTL_HEADER: f"{settings.session_ttl_s:g}"}
    return LoopRequest(
        model=body.model,
        input=[*noted(asked.note), *asked.fresh],
        history=[*summarized(asked.summary), *(item for turn in asked.history for item in turn)],
        instructions=body.instructions,
        tools=tools_for_loop(body.tools),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        limits=Limits(
            max_rounds=settings.max_rounds,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            deadline=settings.deadline_s,
        ),
        principal=asked.principal,
        response_id=asked.id,
        session=None if session is None else session.container_id,
        headers={**headers, "x-toolhost-content": "rich"},
        include=list(body.include),
        options=_options(body),
        fields=object_fields(body),
    )


def noted(note: str) -> list[Item]:
    """What the model is told of its session, as a message of the host's."""
    return [{"type": "message", "role": "developer", "content": note}] if note else []


def summarized(summary: str) -> list[Item]:
    """The summary that stands for turns which are left out."""
    if not summary:
        return []
    return [{"type": "message", "role": "developer", "content": f"Summary of the conversation so far:\n{summary}"}]


def container_of(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The container that a request names for its code. Raises ApiError."""
    for tool in tools:
        if tool.get("type") != "code_interpreter":
            continue
        container = tool.get("container", {"type": "auto"})
        if isinstance(container, str):
            return container
        if not isinstance(container, Mapping) or container.get("type", "auto") != "auto":
            raise bad_request('tools: container must be an id or {"type": "auto"}', "tools")
    return None


def stateful(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tools have state that a conversation keeps."""
    return any(
        tool.get("type") == "code_interpreter"
        or (tool.get("type") == "mcp" and tool.get("server_label") in (*STATEFUL, "code_interpreter"))
        for tool in tools
    )


def searches(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the browser is among the tools."""
    return any(
        str(tool.get("type")).startswith(_SEARCHES)
        or (tool.get("type") == "mcp" and tool.get("server_label") in ("browser", *_SEARCHES))
        for tool in tools
    )


def tools_for_loop(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as the loop reads them. Raises ApiError naming the tool that is wrong."""
    functions = [tool.get("name") for tool in tools if tool.get("type") == "function"]
    for name in functions:
        if functions.count(name) > 1:
            raise bad_request(f"tools: more than one function has the name {name!r}", "tools", "invalid_value")
    return [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    match kind:
        case "function":
            name, parameters = tool.get("name"), tool.get("parameters")
            if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
                raise bad_request(
                    f"{place} needs a `name` of 1 to 64 letters, digits, _ and -", "tools", "invalid_value"
                )
            if parameters is not None and not isinstance(parameters, Mapping):
                raise bad_request(f"{place}.parameters must be a JSON schema", "tools", "invalid_value")
            if not isinstance(tool.get("description") or "", str) or not isinstance(tool.get("strict"), bool | None):
                raise bad_request(f"{place}: description is a text, strict true or false", "tools", "invalid_value")
        case "mcp":
            _check_mcp(tool, place)
        case str() if kind.startswith(_SEARCHES):
            _check_search(tool, place)
            return {**tool, "type": "web_search"}
        case "code_interpreter":
            pass
        case _:
            raise bad_request(f"{place}: tools of type {kind!r} are not supported", "tools", "unsupported_value")
    return dict(tool)


def _check_search(tool: Mapping[str, Any], place: str) -> None:
    """What narrows a search is done or refused; what only tunes it may be ignored."""
    filters = tool.get("filters") or {}
    domains = filters.get("allowed_domains") or [] if isinstance(filters, Mapping) else None
    if not (
        isinstance(domains, list)
        and len(domains) <= MAX_DOMAINS
        and all(isinstance(one, str) and len(one) <= MAX_DOMAIN and DOMAIN.fullmatch(one) for one in domains)
    ):
        raise bad_request(
            f"{place}.filters.allowed_domains must be a list of up to {MAX_DOMAINS} host names",
            "tools",
            "invalid_value",
        )
    if foreign := sorted(set(filters) - {"allowed_domains"}):
        raise bad_request(f"{place}.filters: {foreign[0][:64]!r} is not supported", "tools", "unsupported_value")
    if tool.get("external_web_access") is False:
        raise bad_request(
            f"{place}: external_web_access false is not supported; what the browser reads is the operator's to say",
            "tools",
            "unsupported_value",
        )


def _check_mcp(tool: Mapping[str, Any], place: str) -> None:
    if not isinstance(tool.get("server_label"), str) or not tool["server_label"]:
        raise bad_request(f"{place} needs a `server_label`", "tools", "invalid_value")
    headers = tool.get("headers") or {}
    if not isinstance(headers, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str) and _is_header(name, value) for name, value in headers.items()
    ):
        raise bad_request(f"{place}.headers must be names and values of HTTP headers", "tools", "invalid_value")
    if not tool.get("server_url"):
        foreign = sorted(name for name in headers if name.lower() not in NARROWING)
        if foreign:
            allowed = ", ".join(sorted(NARROWING))
            raise bad_request(
                f"{place}.headers: {foreign[0][:64]!r} may not be sent to this host's tools; allowed are {allowed}",
                "tools",
                "invalid_value",
            )
    if not _is_allowed_tools(tool.get("allowed_tools")):
        raise bad_request(
            f"{place}.allowed_tools must be a list of names, or tool_names and read_only", "tools", "invalid_value"
        )
    approval = tool.get("require_approval")
    if not (approval in (None, "always", "never") or _is_filter(approval)):
        raise bad_request(
            f"{place}.require_approval must be always, never, or name tools under these", "tools", "invalid_value"
        )


def _is_allowed_tools(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return value is None or _is_names(value)
    names, read_only = value.get("tool_names"), value.get("read_only")
    return (
        set(value) <= {"tool_names", "read_only"}
        and (names is None or _is_names(names))
        and isinstance(read_only, bool | None)
    )


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_filter(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value or not set(value) <= {"always", "never"}:
        return False
    # Exactly these: what else a filter may say (`read_only`) would be ignored, and tools run without consent.
    return all(
        isinstance(one, Mapping) and set(one) == {"tool_names"} and _is_names(one["tool_names"])
        for one in value.values()
    )


def _is_header(name: str, value: str) -> bool:
    return (
        name.isascii() and name.replace("-", "").replace("_", "").isalnum() and value.isascii() and value.isprintable()
    )


def _choice(choice: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    if isinstance(choice, Mapping) and str(choice.get("type", "")).startswith(_SEARCHES):
        return {**choice, "type": "web_search"}
    return choice


def _options(body: CreateResponse) -> dict[str, Any]:
    options: dict[str, Any] = {
        name: getattr(body, name)
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs")
        if getattr(body, name) is not None
    }
    if body.reasoning is not None:
        options["reasoning"] = {"effort": None, "summary": None, **body.reasoning}
    if body.text is not None:
        options["text"] = {"format": {"type": "text"}, **body.text}
    return options


def object_fields(body: CreateResponse) -> dict[str, Any]:
    """Keys of the response object that the loop does not know."""
    fields: dict[str, Any] = {
        "previous_response_id": body.previous_response_id,
        "conversation": {"id": body.conversation_id} if body.conversation_id else None,
        "metadata": body.metadata,
        "store": body.store,
        "background": body.background,
        "truncation": body.truncation,
        "service_tier": "default" if body.service_tier in (None, "auto") else body.service_tier,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "tools": [_shown(tool) for tool in body.tools],
    }
    for name in ("presence_penalty", "frequency_penalty", "top_logprobs", "user"):
        if getattr(body, name) is not None:
            fields[name] = getattr(body, name)
    return fields


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the object shows it: headers carry credentials; what the type demands is there."""
    shown = {key: value for key, value in tool.items() if key not in ("headers", "authorization")}
    if tool.get("type") == "function":
        shown = {"parameters": None, "strict": None, **shown}
    elif tool.get("type") == "code_interpreter":
        shown = {"container": {"type": "auto"}, **shown}
    return shown
