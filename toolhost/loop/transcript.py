"""What the model sees: items in, turns out.

A transcript is a list of input items of the Responses API, as plain JSON. Hosted calls are in it as function calls
with their outputs, because that is how any model sees them; `model_view` turns replayed output items into that form.
`turns` groups a transcript into the turns of a chat, from which each adapter makes its wire format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from toolhost.loop.errors import RequestError
from toolhost.loop.results import EMPTY

Item = dict[str, Any]

_CALL_TYPES = frozenset(
    {"mcp_call", "code_interpreter_call", "web_search_call", "mcp_approval_request", "function_call"}
)

UNKNOWN_LABEL = "unknown"
"""The server label of calls to tools that do not exist."""
NO_RESULT = "No result was provided for this call."
"""Of a call that was certainly not executed: it waited for consent, or was never whole."""
OUTCOME_UNKNOWN = (
    "Whether the call took effect is not known; it was not repeated. It may have run: check before repeating it."
)
"""Of a call that was handed out and whose result never came."""
DECLINED = "The user declined this call; it was not executed."


@dataclass(frozen=True, slots=True)
class TurnCall:
    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Turn:
    """One message of a chat.

    A `tool` turn is the result of one call. `parts` are the content parts of a user's or a tool's message (`text`,
    `image_url`); `reasoning` are the reasoning items of an assistant's turn.
    """

    role: Literal["system", "user", "assistant", "tool"]
    parts: list[dict[str, Any]] = field(default_factory=list)
    calls: list[TurnCall] = field(default_factory=list)
    reasoning: list[Item] = field(default_factory=list)
    call_id: str = ""

    @property
    def text(self) -> str:
        return "".join(part["text"] for part in self.parts if part["type"] == "text")


def user_message(text: str) -> Item:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def call_item(call_id: str, name: str, arguments: str, executed: bool = True) -> Item:
    """A call. `executed` False: it was not handed to anybody (yet), which the item says by its status."""
    item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return item if executed else {**item, "status": "incomplete"}


def output_item(call_id: str, text: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def as_items(value: str | Iterable[Mapping[str, Any]]) -> list[Item]:
    """A request's `input` as items: a string is one user message; `type` of a message may be missing."""
    if isinstance(value, str):
        return [user_message(value)]
    items: list[Item] = []
    for item in value:
        if not isinstance(item, Mapping):
            raise RequestError("input must be a string or a list of items", "input")
        kind = item.get("type", "message" if "role" in item else None)
        if kind is None:
            raise RequestError("an input item has neither a type nor a role", "input")
        items.append({**item, "type": kind})
    return items


def model_view(items: Sequence[Item], names: Mapping[tuple[str, str], str]) -> list[Item]:
    """Items as the model sees them.

    `names` maps (namespace, tool) to the name under which the model was offered the tool. Items that only concern the
    client (tool lists, searches whose results are not in the item) are left out. A hosted item is a call and its result
    in one; those of one round, which their ids tell, become calls first and results after them, as the model made them.
    Raises RequestError.
    """
    view: list[Item] = []
    called: set[str] = set()
    results: list[Item] = []
    round_id: str | None = None

    def call(call_id: str, name: str, arguments: str, executed: bool = True) -> None:
        if call_id not in called:
            called.add(call_id)
            view.append(call_item(call_id, name, arguments, executed))

    for item in items:
        if (now := _round_of(item)) is None or now != round_id:
            view += results
            results = []
        round_id = now
        match item["type"]:
            case "mcp_call":
                call_id = call_id_of(item.get("approval_request_id") or item["id"])
                call(call_id, _name(names, item), item["arguments"])
                results.append(output_item(call_id, _mcp_output(item)))
            case "mcp_approval_request":
                call(call_id_of(item["id"]), _name(names, item), item["arguments"], executed=False)
            case "mcp_approval_response":
                call_id = call_id_of(item["approval_request_id"])
                if not item.get("approve") and call_id in called:
                    view.append(output_item(call_id, f"{DECLINED} {item.get('reason') or ''}".strip()))
            case "code_interpreter_call":
                code = json.dumps({"code": item.get("code") or ""})
                call(call_id_of(item["id"]), names.get(("python", "python"), "python"), code)
                results.append(output_item(call_id_of(item["id"]), _logs(item)))
            case "function_call":
                if item["call_id"] not in called:
                    called.add(item["call_id"])
                    view.append(item)
            case "message" | "reasoning" | "function_call_output":
                view.append(item)
            case "mcp_list_tools" | "web_search_call":
                pass
            case other:
                raise RequestError(f"items of type {other!r} are not supported", "input")
    return view + results


def call_id_of(item_id: str) -> str:
    """The call id that belongs to a hosted item's id: both are minted together, `ci_X` with `call_X`."""
    return f"call_{item_id.partition('_')[2] or item_id}"


def call_suffix(round_id: str, number: int) -> str:
    """What the ids of a call share, of its item and its approval too: the round that made it, and its place there."""
    return f"{round_id}_{number}"


def _round_of(item: Item) -> str | None:
    """The round that made a call's item, None for another item or an id that was not minted here."""
    if item["type"] not in _CALL_TYPES:
        return None
    found = re.fullmatch(r"[a-z]+_(\w+)_\d+", str(item.get("approval_request_id") or item.get("id")))
    return found[1] if found else None


def new_approvals(items: Sequence[Item]) -> list[Item]:
    """The approval responses that nothing has followed yet: those after the last item a model or a host made."""
    made = {
        "function_call",
        "mcp_call",
        "reasoning",
        "mcp_approval_request",
        "code_interpreter_call",
        "web_search_call",
    }
    fresh: list[Item] = []
    for item in items:
        if item["type"] == "mcp_approval_response":
            fresh.append(item)
        elif item["type"] in made or item.get("role") == "assistant":
            fresh = []
    return fresh


def paired(items: Sequence[Item]) -> list[Item]:
    """Every round's calls, directly followed by exactly one output each: models' servers refuse anything else.

    Calls that follow one another are one round; any other item ends it, and so does a result of one of its calls. A
    call that nobody answered gets an output that says so. Raises RequestError for an output without its call.
    """
    outputs: dict[str, Item] = {}
    calls = {item["call_id"] for item in items if item["type"] == "function_call"}
    for item in items:
        if item["type"] == "function_call_output":
            if item.get("call_id") not in calls:
                raise RequestError(f"no tool call found for the output of call {item.get('call_id')!r}", "input")
            outputs.setdefault(item["call_id"], item)
    result: list[Item] = []
    waiting: list[Item] = []
    answered = False

    def end_round() -> None:
        nonlocal answered
        result.extend(outputs.get(one["call_id"]) or output_item(one["call_id"], _unanswered(one)) for one in waiting)
        waiting.clear()
        answered = False

    for item in items:
        is_call = item["type"] == "function_call"
        if item["type"] == "function_call_output":
            answered |= any(one["call_id"] == item["call_id"] for one in waiting)
            continue
        if answered or not is_call:
            end_round()
        result.append(_readable(item))
        if is_call:
            waiting.append(item)
    end_round()
    return result


def _unanswered(call: Item) -> str:
    return NO_RESULT if call.get("status") == "incomplete" else OUTCOME_UNKNOWN


def turns(items: Sequence[Item], instructions: str | None = None) -> list[Turn]:
    """A paired transcript as the turns of a chat."""
    result: list[Turn] = []
    if instructions:
        result.append(Turn("system", [{"type": "text", "text": instructions}]))
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _assistant(result).parts.append({"type": "text", "text": _assistant_text(item)})
            case "message":
                role: Literal["system", "user"] = "user" if item["role"] == "user" else "system"
                result.append(Turn(role, _parts(item["content"])))
            case "reasoning":
                _assistant(result, fresh=True).reasoning.append(item)
            case "function_call":
                call = TurnCall(item["call_id"], item["name"], item["arguments"])
                _assistant(result).calls.append(call)
            case "function_call_output":
                result.append(Turn("tool", _parts(item["output"]), call_id=item["call_id"]))
    return result


def reasoning_text(item: Item) -> str:
    return "".join(part.get("text", "") for part in item.get("content") or ())


def _assistant(result: list[Turn], fresh: bool = False) -> Turn:
    """The assistant's turn that is being collected; reasoning after calls or text opens a new one."""
    last = result[-1] if result else None
    if last is None or last.role != "assistant" or (fresh and (last.calls or last.parts)):
        result.append(Turn("assistant"))
    return result[-1]


def _assistant_text(item: Item) -> str:
    content = item["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts: list[dict[str, Any]] = []
    for part in content or ():
        match part.get("type"):
            case "input_text" | "output_text" | "text":
                parts.append({"type": "text", "text": part["text"]})
            case "input_image" if part.get("image_url"):
                parts.append({"type": "image_url", "url": part["image_url"]})
            case other:
                raise RequestError(f"content of type {other!r} is not supported", "input")
    return parts


def _readable(item: Item) -> Item:
    """A call whose arguments are not a JSON object that can be sent would break every later request: it is replayed
    without them."""
    if item["type"] != "function_call" or _is_object(item.get("arguments")):
        return item
    return {**item, "arguments": "{}"}


def _is_object(text: Any) -> bool:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
        return isinstance(value, dict)
    except (TypeError, ValueError, RecursionError):
        return False


def _name(names: Mapping[tuple[str, str], str], item: Item) -> str:
    if item["server_label"] == UNKNOWN_LABEL:
        return str(item["name"])
    key = (item["server_label"], item["name"])
    return names.get(key, "_".join(key))


def _mcp_output(item: Item) -> str:
    """The text that the model was given when the call ran."""
    error = item.get("error")
    if not error:
        output = item.get("output")
        return OUTCOME_UNKNOWN if output is None else str(output) or EMPTY
    if isinstance(error, str):
        return error
    if isinstance(error.get("content"), list):
        return "\n".join(part.get("text", "") for part in error["content"]) or OUTCOME_UNKNOWN
    return error.get("message") or OUTCOME_UNKNOWN


def _logs(item: Item) -> str:
    logs = [part["logs"] for part in item.get("outputs") or () if part.get("type") == "logs"]
    if logs:
        return "\n".join(logs)
    ended_well = item.get("status", "completed") == "completed"
    return "The output of this run is not part of the history." if ended_well else OUTCOME_UNKNOWN
