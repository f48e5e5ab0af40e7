"""A history that is too long for the model: whole turns are left out, oldest first, and a summary stands for them.

Above: `service`. Below: the model. Tokens are estimated (four characters are about one), so a margin is left; a call
and its result are in one turn and are never separated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from toolhost.gateway.errors import bad_request
from toolhost.gateway.prepare import Asked
from toolhost.gateway.records import Item
from toolhost.loop.errors import ModelError
from toolhost.loop.models.base import ModelClient, ModelRequest, TextDelta
from toolhost.loop.results import excerpt
from toolhost.loop.transcript import user_message

CHARACTERS_PER_TOKEN = 4
ANSWER_SHARE = 0.25
"""Of the context, kept for the answer when the request does not say how long it may be."""
FILL = 0.7
"""Turns go until the history fills this much, so that the next turn does not have to do it again."""
ITEM_CHARACTERS = 4000
"""Of one item, shown to the model that writes the summary."""
SUMMARY_TOKENS = 512
ASK = (
    "Summarise this conversation for yourself: facts, decisions, names, numbers and open questions that later turns "
    "may need. At most 300 words. Answer with the summary alone.\n\n"
)
NO_SUMMARY = "Earlier turns of this conversation were left out because it became too long; they were not summarised."


class Fitter:
    """Makes requests fit. `context_tokens` None: the model's context is not known, and nothing is changed."""

    def __init__(self, model: ModelClient, context_tokens: int | None) -> None:
        self._model = model
        self._context = context_tokens

    async def fitted(self, asked: Asked) -> Asked:
        """The request with a history that fits. Raises ApiError if truncation is not allowed, or not enough."""
        if asked.summary:
            asked = self._without_summarized(asked)
        if self._context is None:
            return asked
        body = asked.body
        answer = body.max_output_tokens or int(self._context * ANSWER_SHARE)
        fixed = estimate(asked.fresh) + len(body.instructions or "") // CHARACTERS_PER_TOKEN + _tools(asked)
        room = self._context - min(answer, self._context // 2) - fixed
        turns, fresh = [list(turn) for turn in asked.history], list(asked.fresh)
        if sum(map(estimate, turns)) <= room:
            return asked
        if body.truncation != "auto" or (room <= 0 and not _replayed(fresh)):
            raise bad_request(
                f"the input is longer than the model's context of {self._context} tokens"
                + ("" if body.truncation == "auto" else '; truncation "auto" leaves out the oldest turns'),
                "input",
                "context_length_exceeded",
            )
        if room <= 0:
            # A client that replays everything has its turns in the input.
            earlier, fresh = split_last(fresh)
            turns += earlier
            room = self._context - min(answer, self._context // 2) - estimate(fresh)
        dropped: list[list[Item]] = []
        while turns and sum(map(estimate, turns)) > room * FILL:
            dropped.append(turns.pop(0))
        summary = await self._summary(asked, dropped)
        return replace(asked, history=turns, fresh=fresh, summary=summary)

    def _without_summarized(self, asked: Asked) -> Asked:
        return replace(asked, history=asked.history[asked.summarized :], summarized=0)

    async def _summary(self, asked: Asked, dropped: Sequence[Sequence[Item]]) -> str:
        """What the model says of the turns that go; a plain remark if it cannot."""
        told = [f"Earlier summary: {asked.summary}"] if asked.summary else []
        told += [line for turn in dropped for item in turn if (line := _told(item))]
        limit = int((self._context or 0) * CHARACTERS_PER_TOKEN * 0.6)
        request = ModelRequest(
            asked.body.model,
            [user_message(ASK + excerpt("\n".join(told), limit))],
            tool_choice="none",
            max_output_tokens=SUMMARY_TOKENS,
        )
        text = ""
        try:
            async with aclosing(self._model.round(request)) as deltas:
                async for delta in deltas:
                    text += delta.text if isinstance(delta, TextDelta) else ""
        except ModelError:
            return NO_SUMMARY
        return text.strip() or NO_SUMMARY


def estimate(items: Sequence[Item]) -> int:
    """About how many tokens items are."""
    return sum(len(json.dumps(item, ensure_ascii=False)) // CHARACTERS_PER_TOKEN for item in items)


def split_last(items: Sequence[Item]) -> tuple[list[list[Item]], list[Item]]:
    """Turns of replayed items, which begin with a user's message each, and the last of them."""
    turns: list[list[Item]] = []
    for item in items:
        if not turns or (item["type"] == "message" and item.get("role") == "user" and _closed(turns[-1])):
            turns.append([])
        turns[-1].append(item)
    return turns[:-1], turns[-1] if turns else []


def _closed(turn: Sequence[Item]) -> bool:
    """Whether every call of a turn has its result."""
    calls = {item["call_id"] for item in turn if item["type"] == "function_call"}
    return calls <= {item["call_id"] for item in turn if item["type"] == "function_call_output"}


def _replayed(fresh: Sequence[Item]) -> bool:
    return len(split_last(fresh)[0]) > 0


def _tools(asked: Asked) -> int:
    return sum(len(json.dumps(tool)) for tool in asked.body.tools) // CHARACTERS_PER_TOKEN


def _told(item: Item) -> str:
    """An item as a line for the summary."""
    match item["type"]:
        case "message":
            content = item["content"]
            text = content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)
            return f"{item['role']}: {excerpt(text, ITEM_CHARACTERS)}"
        case "function_call":
            return f"call {item['name']}: {excerpt(item['arguments'], ITEM_CHARACTERS)}"
        case "function_call_output":
            return f"result: {excerpt(str(item['output']), ITEM_CHARACTERS)}"
    return ""
