"""Tags with very many attributes: each one's name is compared with all before it, so that a page may cost minutes.

Above: `html_isolated`. Where tags begin is not known without parsing: comments and scripts look like them, and a
quotation mark there seems to open a value, which then hides what follows. So every `<` with a letter is read as a tag
that begins there, each by the rules of the standard's tokenizer. That is linear: two that come to the same place go on
as one, at most a few are under way at any place, and what many of them may begin within (names of tags, values without
quotation marks) is looked through once. Tags that close have attributes too, which cost even more.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator

MAX_ATTRIBUTES = 1000
MAX_MERGED = 100  # tags of html and body, whose attributes are added to the first one's
ADDED = 10  # attributes of each
_TAG = re.compile(r"</?[a-zA-Z][^\s/><]*+(?=[\s/<])")  # that may have attributes
_NAME = re.compile(r"</?[^\s/>]*+")
_MERGED = re.compile(r"<(?:html|body)\b", re.IGNORECASE)
_FORM = r"[\s/]*+[^\s/>][^\s/>=]*+(?:\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|{plain})?+)?+"
_ATTRIBUTE = re.compile(_FORM.format(plain=r"[^\s>\"'][^\s>]*+"))
_UNTIL_PLAIN = re.compile(_FORM.format(plain=r"([^\s>\"'])"))  # to a value without quotation marks, whose rest is:
_REST_OF_PLAIN = re.compile(r"[^\s>]*+")
# One tag after another, as if there were no comments: if no tag is left over, none hides another.
_IN_TURN = re.compile(
    rf"{_TAG.pattern}[^\s/>]*+(?:{_ATTRIBUTE.pattern}){{0,{MAX_ATTRIBUTES}}}+({_ATTRIBUTE.pattern})?+"
)
_REST = re.compile(
    rf"({_TAG.pattern}[^\s/>]*+(?:{_ATTRIBUTE.pattern}){{0,{MAX_ATTRIBUTES}}}+)(?:{_ATTRIBUTE.pattern})*+"
)


def crowded(source: str, most_steps: int) -> bool:
    """Whether a tag may have more than MAX_ATTRIBUTES; also when that takes more than `most_steps` to find out."""
    found = 0
    for match in _IN_TURN.finditer(source):
        if match.lastindex:
            return True
        found += 1
    return found != len(_TAG.findall(source)) and next(_crowds(source, most_steps), None) is not None


def without_crowds(source: str) -> str:
    """`source` with the first MAX_ATTRIBUTES attributes of each tag. A tag that was hidden ends after those, and the
    others are text."""
    source = _REST.sub(r"\1", source)
    parts, begin = [], 0
    for at in _crowds(source, None):
        parts.append(source[begin:at])
        begin = at
    return ">".join([*parts, source[begin:]])


def _crowds(source: str, most_steps: int | None) -> Iterator[int]:
    """The places where a tag's attributes become too many. After `most_steps` every place is one."""
    heap: list[int] = []
    counts: dict[int, int] = {}  # for each place in `heap`, how many attributes a tag has there, at most
    merged = 0
    plain = range(0)  # the last value without quotation marks, its end included
    for at, name_end in _begins(source):
        while heap and heap[0] <= at:
            place = heapq.heappop(heap)
            count = counts.pop(place)
            attribute = _UNTIL_PLAIN.match(source, place)
            if attribute is None:
                continue  # the tag ends, or the page
            if most_steps is not None:
                most_steps -= 1
            if count >= MAX_ATTRIBUTES or most_steps == 0:
                yield place
                continue
            end = attribute.end()
            if attribute.lastindex:
                if end not in plain:
                    rest = _REST_OF_PLAIN.match(source, end)
                    plain = range(end, (rest.end() if rest else end) + 1)
                end = plain[-1]
            _meet(heap, counts, end, count + 1)
        count = 0
        if _MERGED.match(source, at):
            merged += 1
            count = 0 if merged == 1 else MAX_ATTRIBUTES - (ADDED if merged <= MAX_MERGED else 0)
        _meet(heap, counts, name_end, count)


def _meet(heap: list[int], counts: dict[int, int], place: int, count: int) -> None:
    if place not in counts:
        heapq.heappush(heap, place)
    counts[place] = max(count, counts.get(place, 0))


def _begins(source: str) -> Iterator[tuple[int, int]]:
    """Where tags may begin, and where their names end; at last the end of the page, so that all come to their ends."""
    end = -1
    for match in _TAG.finditer(source):
        at = match.start()
        if at >= end:  # else it is in a name, which is looked through once
            end = _NAME.match(source, at).end()  # type: ignore[union-attr]  # it matches anything
        yield at, end
    yield len(source), len(source)
