"""The displayed form of a page: header, viewport, numbered lines."""

from __future__ import annotations

from urllib.parse import unquote

from toolhost.browsing.errors import BrowserError
from toolhost.browsing.page import Page, clean
from toolhost.browsing.tokens import TokenCounter

VIEW_TOKENS = 1024
VIEW_CHARACTERS = 1024
MAX_NUM_LINES = 1000
MAX_SHOWN_URL = 1024


def show(page: Page, cursor: int, loc: int, num_lines: int, count: TokenCounter) -> str:
    """The text a call returns for `page`.

    Args:
        loc: First display line.
        num_lines: How many lines; not positive means by the token budget.
        count: Token counter of the budget.

    Raises:
        BrowserError: `loc` is outside the page.
    """
    check_location(page, loc)
    total = len(page.lines)
    end = viewport_end(page.lines, loc, num_lines, count)
    url = shown_url(page.url)
    header = f"[{cursor}] {page.title}" + (f" ({url})" if url else "")
    text = f"{header}\n**viewing lines [{loc} - {end - 1}] of {total - 1}**\n\n{numbered(page.lines, loc, end)}"
    if num_lines > MAX_NUM_LINES and end < total:
        text += f"\n\n(num_lines is capped at {MAX_NUM_LINES}; go on with loc={end}.)"
    return text


def check_location(page: Page, loc: int) -> None:
    """Raises BrowserError when the page has no line `loc`."""
    if loc >= len(page.lines):
        raise BrowserError(f"Invalid location parameter: `{loc}`. Cannot exceed page maximum of {len(page.lines) - 1}.")


def viewport_end(lines: list[str], loc: int, num_lines: int, count: TokenCounter) -> int:
    """One past the last line to show, from `loc` on; always at least one line."""
    if num_lines > 0:
        return min(loc + min(num_lines, MAX_NUM_LINES), len(lines))
    if _fits(lines, loc):
        return len(lines)
    budget = VIEW_TOKENS
    for index in range(loc, len(lines)):
        budget -= count(f"L{index}: {lines[index]}\n")
        if budget < 0:
            return max(index, loc + 1)
    return len(lines)


def _fits(lines: list[str], loc: int) -> bool:
    """Whether the rest of the page is so short that no token needs counting."""
    used = -1
    for index in range(loc, len(lines)):
        used += len(lines[index]) + len(f"L{index}: ") + 1
        if used > VIEW_CHARACTERS:
            return False
    return True


def numbered(lines: list[str], start: int, end: int) -> str:
    """Lines `start` to `end` (exclusive) with their numbers."""
    return "\n".join(f"L{index}: {lines[index]}" for index in range(start, end))


def shown_url(url: str) -> str:
    """A URL as the header shows it: unquoted, on one line, at most 1024 characters."""
    text = " ".join(clean(unquote(url)).split())
    return text if len(text) <= MAX_SHOWN_URL else text[: MAX_SHOWN_URL - 3] + "..."
