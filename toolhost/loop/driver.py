"""The driver: performs what `steps` decides. A library (`run`, an async generator of events) for command and gateway.

Above: `toolhost run`, the gateway, applications. Below: a model behind `models.base`, tools behind `tools`, the ledger.
One `LoopRun` is one task: one response, one lifecycle, however many rounds and generations.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

from toolhost.loop.approvals import ApprovalStore, MemoryApprovals
from toolhost.loop.errors import RequestError
from toolhost.loop.executor import Clocks
from toolhost.loop.hooks import Annotate, Check
from toolhost.loop.ids import IdSource, RandomIds
from toolhost.loop.ledger import Ledger
from toolhost.loop.models.base import ModelClient
from toolhost.loop.output_items import Event
from toolhost.loop.request import LoopRequest, Observer, resolve_choice, resolve_tools
from toolhost.loop.rounds import Parts
from toolhost.loop.run import LoopRun
from toolhost.loop.tools import Toolbox, ToolServer, ToolServerFactory, describe
from toolhost.loop.transcript import as_items, model_view, new_approvals, paired, turns


class NoTools:
    """The tool server of a loop without hosted tools."""

    def has_tool(self, name: str) -> bool:
        return False

    def get_tool_description(self, name: str, allowed_tools: list[str] | None = None) -> None:
        return None

    def new_session(
        self, name: str, session_id: str, headers: dict[str, str] | None = None
    ) -> AbstractAsyncContextManager[Any]:
        raise KeyError(name)


@dataclass
class LoopDriver:
    """What runs have in common. `tools` is one tool server for all, or a factory that makes one for each principal.

    `check_input` sees the text of each user message before the model does, `check_output` every batch of text before
    the user does. `annotate` is asked what a finished message cites.
    """

    model: ModelClient
    tools: ToolServer | ToolServerFactory = field(default_factory=NoTools)
    ledger: Ledger = field(default_factory=Ledger)
    approvals: ApprovalStore = field(default_factory=MemoryApprovals)
    check_input: Check | None = None
    check_output: Check | None = None
    annotate: Annotate | None = None
    ids: IdSource = field(default_factory=RandomIds)
    clocks: Clocks = field(default_factory=lambda: Clocks(time.time, time.monotonic))

    async def start(self, request: LoopRequest, observer: Observer | None = None) -> LoopRun:
        """Check a request and start its run. Raises RequestError (nothing was started then).

        Every open approval that the input answers is checked here and taken when the run executes it.
        """
        tools = self._tools_for(request.principal)
        namespaces, functions = resolve_tools(request.tools)
        found = {one.name: describe(tools, one) for one in namespaces}
        missing = [one.name for one in namespaces if one.kind != "mcp" and not found[one.name]]
        if missing:
            raise RequestError(f"no tool server has the namespace {missing[0]!r}", "tools")
        toolbox = Toolbox(namespaces, [tool for one in found.values() for tool in one], functions)
        choice = resolve_choice(request.tool_choice, toolbox)
        history, fresh = as_items(request.history), as_items(request.input)
        approvals = new_approvals([*history, *fresh])
        for item in approvals:
            stored = await self.approvals.peek(str(item.get("approval_request_id")), request.principal)
            if item.get("approve") and (stored.namespace, stored.tool) not in toolbox.names:
                raise RequestError(f"the approved tool {stored.namespace}.{stored.tool} is not offered", "tools")
        view = model_view([*history, *fresh], toolbox.names)
        turns(paired(view))  # What cannot be said to a model is the caller's error, found before anything starts.
        parts = Parts(
            self.model, tools, self.ledger, self.approvals, self.check_input, self.check_output, self.ids, self.annotate
        )
        run = LoopRun(request, parts, self.clocks, toolbox, choice, observer)
        run.begin(history, fresh, approvals)
        return run

    async def run(self, request: LoopRequest) -> AsyncGenerator[Event, None]:
        """The events of a run, as they happen. Closing the generator cancels the run."""
        run = await self.start(request)
        async with aclosing(run.events()) as events:
            async for event in events:
                yield event

    def _tools_for(self, principal: str) -> ToolServer:
        if callable(self.tools):
            return self.tools(principal)
        return self.tools
