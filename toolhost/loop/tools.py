"""Tool servers as the driver sees them, and the names under which a model is offered their tools.

`ToolServer` is the shape of vLLM's interface of that name (`vllm.entrypoints.mcp.tool_server`), so that its objects
run here and ours run there: arguments go by position, because implementations name them differently. The toolbox
below is pure: names in, routes out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from toolhost.loop.models.base import ModelTool

CLEANUP_TOOL = "cleanup_session"


class ToolServer(Protocol):
    """Namespaces of tools. Pass arguments by position."""

    def has_tool(self, name: str, /) -> bool:
        """Whether there is a namespace of this name."""
        ...

    def get_tool_description(self, name: str, allowed_tools: list[str] | None = None, /) -> Any:
        """An object with `description` and `tools` (each `name`, `description`, `parameters`), or None."""
        ...

    def new_session(
        self, name: str, session_id: str, headers: dict[str, str] | None = None, /
    ) -> AbstractAsyncContextManager[Any]:
        """A session of the namespace: an object with `call_tool(name, arguments)` and `_client_info`."""
        ...


class ToolServerFactory(Protocol):
    """A host in the same process: it gives each principal a tool server of its own."""

    def __call__(self, principal: str) -> ToolServer: ...


@runtime_checkable
class AttemptSession(Protocol):
    """A session that can name an attempt to the host, so that asking again joins it."""

    async def call_attempt(self, name: str, args: dict[str, Any], attempt: str) -> Any:
        """Call a tool once under this attempt id. Raises ToolServerGone if the call's fate is not known."""
        ...


@dataclass(frozen=True, slots=True)
class HostedTool:
    """One tool of a namespace. `read_only` tools may be tried again when an answer was lost.

    `operation_key` names the argument by which the business service recognises a repeated write; a call that carries
    it may be tried again too.
    """

    namespace: str
    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    read_only: bool = False
    operation_key: str | None = None

    @property
    def key(self) -> str:
        return f"{self.namespace}.{self.name}"


PYTHON_TOOL = HostedTool(
    "python",
    "python",
    "Runs Python code in a persistent session. Variables, imports and files stay between calls.",
    {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
        "required": ["code"],
    },
)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace that a run may use.

    `approval` says which tools need the user's consent: all but those in `exempt`, none, or those named. `allowed` is a
    hard filter, and so is `read_only`: only tools that are marked as such.
    """

    name: str
    kind: Literal["code", "search", "mcp"]
    approval: Literal["always", "never"] | frozenset[str] = "never"
    exempt: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    read_only: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def needs_approval(self, tool: str) -> bool:
        if isinstance(self.approval, frozenset):
            return tool in self.approval
        return self.approval == "always" and tool not in self.exempt


@dataclass(frozen=True, slots=True)
class ClientFunction:
    """A function that the application answers."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool | None = None


Route = HostedTool | ClientFunction


class Toolbox:
    """All tools of a run: what the model is offered, and where a name that it used leads."""

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        tools: Iterable[HostedTool],
        functions: Sequence[ClientFunction] = (),
    ) -> None:
        self.namespaces = {one.name: one for one in namespaces}
        self.functions = {one.name: one for one in functions}
        self.hosted: dict[str, HostedTool] = {}
        for tool in tools:
            if self._is_allowed(tool):
                self.hosted[self._free_name(tool)] = tool
        self.names = {(tool.namespace, tool.name): name for name, tool in self.hosted.items()}
        self._aliases = self._make_aliases()

    def offered(self, hosted: bool = True) -> list[ModelTool]:
        """The tools for the model; without the hosted ones once their budget is used up."""
        tools = [ModelTool(one.name, one.description, one.parameters, one.strict) for one in self.functions.values()]
        if hosted:
            tools += [ModelTool(name, one.description, one.parameters) for name, one in self.hosted.items()]
        return tools

    def route(self, name: str) -> Route | None:
        """Where a name leads: exact first, then the spellings that models make of it."""
        return self.functions.get(name) or self.hosted.get(name) or self._aliases.get(_plain(name))

    def _is_allowed(self, tool: HostedTool) -> bool:
        namespace = self.namespaces[tool.namespace]
        if namespace.read_only and not tool.read_only:
            return False
        return namespace.allowed is None or tool.name in namespace.allowed

    def _free_name(self, tool: HostedTool) -> str:
        """A name of the characters and length that every wire takes, not yet in use."""
        name = tool.name if tool.name == tool.namespace else f"{tool.namespace}_{tool.name}"
        name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60]
        number, free = 1, name
        while free in self.hosted or free in self.functions:
            number += 1
            free = f"{name}_{number}"
        return free

    def _make_aliases(self) -> dict[str, Route]:
        aliases: dict[str, Route] = {}
        for tool in self.hosted.values():
            aliases.setdefault(_plain(f"{tool.namespace}.{tool.name}"), tool)
        routes: dict[str, Route] = {**self.hosted, **self.functions}
        for name, route in routes.items():
            aliases.setdefault(_plain(name), route)
        python = self.hosted.get("python")
        if python is not None:
            for alias in ("code_interpreter", "python.python", "python.run", "python.exec", "python.execute"):
                aliases.setdefault(_plain(alias), python)
        for tool in self.hosted.values():
            same = [one for one in self.hosted.values() if one.name == tool.name]
            if len(same) == 1:
                aliases.setdefault(_plain(tool.name), tool)
        return aliases


def _plain(name: str) -> str:
    """A name without what models add: a `functions.` in front, special tokens or blanks behind, another separator."""
    name = name.split("<|", 1)[0].strip().lower()
    for prefix in ("functions.", "functions/", "tools."):
        name = name.removeprefix(prefix)
    return re.sub(r"[^a-z0-9]+", "_", name).strip("_")


def describe(server: ToolServer, namespace: Namespace) -> list[HostedTool]:
    """A namespace's tools, as its server describes them. An empty list: the namespace is not there."""
    if not server.has_tool(namespace.name):
        return []
    found = server.get_tool_description(namespace.name, None)
    tools = [_hosted(namespace.name, one) for one in getattr(found, "tools", None) or ()]
    tools = [tool for tool in tools if tool.name != CLEANUP_TOOL]
    if namespace.name == PYTHON_TOOL.namespace and not tools:
        # Hosts leave this one out of the prompt, because gpt-oss knows it from training; other models do not.
        text = getattr(found, "description", None) or PYTHON_TOOL.description
        return [HostedTool("python", "python", text, PYTHON_TOOL.parameters)]
    return tools


def _hosted(namespace: str, tool: Any) -> HostedTool:
    parameters = getattr(tool, "parameters", None) or {"type": "object", "properties": {}}
    return HostedTool(
        namespace,
        tool.name,
        getattr(tool, "description", "") or "",
        parameters,
        bool(getattr(tool, "read_only", False)),
        getattr(tool, "operation_key", None),
    )


def search_action(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A browser call as the action of a `web_search_call`. A page known only by a link's number has no URL here."""
    match tool:
        case "open":
            target = arguments.get("id")
            return {"type": "open_page", "url": target if isinstance(target, str) else None}
        case "find":
            return {"type": "find_in_page", "pattern": str(arguments.get("pattern", "")), "url": ""}
    query = str(arguments.get("query", ""))
    return {"type": "search", "query": query, "queries": [query]}
