"""Which HTML is read in a process of its own, and how.

The HTML standard's parsing algorithm is quadratic in places: each tag, of an element's end too, may look through all
open elements, an unclosed formatting element is opened again in every later block and compared with all before it, a
list of choices is looked through for each of them, and each attribute's name is compared with all before it in its tag.
A page may cost gigabytes and minutes that way.
"""

from __future__ import annotations

import json
import re

from toolhost.browsing.crowds import crowded
from toolhost.browsing.errors import FetchError
from toolhost.browsing.html import RenderedHtml
from toolhost.browsing.worker import Worker

# Up to these a page costs at most about half a second and a few hundred megabytes, whatever is in it.
MAX_TAGS = 20_000  # of beginnings, and of ends: those need no beginning
MAX_FORMATTING = 10_000
MAX_OPTIONS = 10_000
MAX_REOPENED = 2_000_000
MAX_STEPS = 50_000  # of looking for attributes that hide: a tenth of a second
MAX_CHARACTERS = 2_000_000
MEMORY_BYTES = 2 * 1024 * 1024 * 1024
_TAG = re.compile(r"<[a-zA-Z]")
_END_TAG = re.compile(r"</[a-zA-Z]")
_OPTION = re.compile(r"<opt(?:ion|group)[\s>/]", re.IGNORECASE)
_FORMATTING = re.compile(r"<(?:a|b|big|code|em|font|i|nobr|s|small|strike|strong|tt|u)[\s>/]", re.IGNORECASE)


def is_risky(source: str) -> bool:
    """Whether parsing could take long or much memory."""
    if len(source) > MAX_CHARACTERS:
        return True
    tags = _count(_TAG, source)
    if max(tags, _count(_END_TAG, source)) > MAX_TAGS or _count(_OPTION, source) > MAX_OPTIONS:
        return True
    if crowded(source, MAX_STEPS):
        return True
    formatting = _count(_FORMATTING, source)
    return formatting > MAX_FORMATTING or formatting * (tags - formatting) > MAX_REOPENED


def _count(pattern: re.Pattern[str], source: str) -> int:
    return sum(1 for _ in pattern.finditer(source))


def html_worker(source: str, url: str, schemes: frozenset[str], seconds: float) -> Worker:
    """The worker that renders a page; give its output to `parse_output`."""
    head = json.dumps([url, *sorted(schemes)]).encode()
    data = head + source.encode("utf-8", "replace")
    return Worker("html_worker.py", (MEMORY_BYTES, int(seconds) + 1, len(head)), data, seconds)


def parse_output(output: bytes) -> RenderedHtml:
    """The rendered page. Raises FetchError when the worker met its limits."""
    try:
        title, body, links, anchors = json.loads(output)
    except ValueError:
        raise FetchError("the page is too large or too deeply nested for this browser") from None
    return RenderedHtml(title, body, tuple(links), anchors)
