"""Output items of calls: a function of the client's, a tool of a namespace, code, a search.

Their order is the table in `output_items`, as that of all items.
"""

from __future__ import annotations

from typing import Any, ClassVar

from toolhost.loop.output_items import Event, Outlet, OutputItem


class Call(OutputItem):
    """Base of the items with arguments that arrive in fragments."""

    delta_type: ClassVar[str]
    done_type: ClassVar[str]
    done_field: ClassVar[str] = "arguments"

    def __init__(self, outlet: Outlet, item_id: str, output_index: int) -> None:
        super().__init__(outlet, item_id, output_index)
        self.arguments = ""

    def write(self, delta: str) -> list[Event]:
        self._go("delta")
        self.arguments += delta
        return [self._event(self.delta_type, delta=delta)]

    def seal(self) -> list[Event]:
        """The arguments are whole."""
        self._go("args_done")
        return [self._event(self.done_type, **{self.done_field: self.arguments})]


class FunctionCall(Call):
    """A call for the client to answer."""

    kind = "function_call"
    delta_type = "function_call_arguments.delta"
    done_type = "function_call_arguments.done"

    def __init__(self, outlet: Outlet, item_id: str, output_index: int, call_id: str, name: str) -> None:
        super().__init__(outlet, item_id, output_index)
        self.call_id = call_id
        self.name = name

    def dump(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
            "status": self.status,
        }

    def close(self) -> list[Event]:
        return self._finish("completed")


class McpCall(Call):
    """A call to a tool of a namespace that has no item kind of its own."""

    kind = "mcp_call"
    delta_type = "mcp_call_arguments.delta"
    done_type = "mcp_call_arguments.done"

    def __init__(
        self,
        outlet: Outlet,
        item_id: str,
        output_index: int,
        server_label: str,
        name: str,
        approval_request_id: str | None = None,
    ) -> None:
        super().__init__(outlet, item_id, output_index)
        self.server_label = server_label
        self.name = name
        self.approval_request_id = approval_request_id
        self.output: str | None = None
        self.error: dict[str, Any] | None = None

    def dump(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "mcp_call",
            "server_label": self.server_label,
            "name": self.name,
            "arguments": self.arguments,
            "status": self.status,
            "approval_request_id": self.approval_request_id,
            "output": self.output,
            "error": self.error,
        }

    def open(self) -> list[Event]:
        return [self._added(), self._event("mcp_call.in_progress")]

    def interrupt(self, text: str) -> None:
        """The call was handed out and its result will not come: whoever ends the item, it says so."""
        self.error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}

    def close(self, output: str) -> list[Event]:
        self._go("end")
        self.output = output
        done = self._event("mcp_call.completed")
        return [done, *self._finish("completed")]

    def fail(self, error: dict[str, Any]) -> list[Event]:
        """`error` is a typed error object (`mcp_protocol_error`, `mcp_tool_execution_error`, `http_error`)."""
        self._go("end")
        self.error = error
        return [self._event("mcp_call.failed"), *self._finish("failed")]


class CodeCall(Call):
    """Code run in the Python sandbox."""

    kind = "code_interpreter_call"
    delta_type = "code_interpreter_call_code.delta"
    done_type = "code_interpreter_call_code.done"
    done_field = "code"

    def __init__(self, outlet: Outlet, item_id: str, output_index: int, container_id: str) -> None:
        super().__init__(outlet, item_id, output_index)
        self.container_id = container_id
        self.outputs: list[dict[str, Any]] | None = None

    def dump(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "code_interpreter_call",
            "code": self.arguments,
            "container_id": self.container_id,
            "outputs": self.outputs,
            "status": self.status,
        }

    def open(self) -> list[Event]:
        return [self._added(), self._event("code_interpreter_call.in_progress")]

    def interrupt(self, text: str) -> None:
        """The code was handed out and its result will not come: whoever ends the item, it says so."""
        self.outputs = [{"type": "logs", "logs": text}]

    def run(self) -> list[Event]:
        self._go("interpreting")
        self.status = "interpreting"
        return [self._event("code_interpreter_call.interpreting")]

    def close(self, outputs: list[dict[str, Any]] | None) -> list[Event]:
        self._go("end")
        self.outputs = outputs
        return [self._event("code_interpreter_call.completed"), *self._finish("completed")]

    def fail(self, outputs: list[dict[str, Any]] | None = None) -> list[Event]:
        """There is no failed event of this kind; the item says it. `outputs` are what came all the same."""
        self.outputs = outputs
        return self._finish("failed", "fail")


class SearchCall(OutputItem):
    """A search, or a page opened or looked through, in the browser."""

    kind = "web_search_call"

    def __init__(self, outlet: Outlet, item_id: str, output_index: int, action: dict[str, Any]) -> None:
        super().__init__(outlet, item_id, output_index)
        self.action = action

    def dump(self) -> dict[str, Any]:
        return {"id": self.id, "type": "web_search_call", "action": dict(self.action), "status": self.status}

    def open(self) -> list[Event]:
        return [self._added(), self._event("web_search_call.in_progress")]

    def run(self) -> list[Event]:
        self._go("searching")
        self.status = "searching"
        return [self._event("web_search_call.searching")]

    def close(self) -> list[Event]:
        self._go("end")
        return [self._event("web_search_call.completed"), *self._finish("completed")]

    def fail(self) -> list[Event]:
        return self._finish("failed", "fail")
