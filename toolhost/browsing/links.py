"""Links: one id per absolute URL, and the marks `【id†text】` and `【id†text†host】`."""

from __future__ import annotations

import re
from urllib.parse import urljoin, urlsplit

from toolhost.browsing.page import clean, one_line

MAX_URL = 8192
_MARK = re.compile(r"【\d+†([^†】]*)(?:†[^†】]*)?】")


def host_of(url: str) -> str:
    """Host of a URL with its port, without credentials; empty for what has none."""
    try:
        return clean(urlsplit(url).netloc.rpartition("@")[2]).replace("†", "‡")
    except ValueError:
        return ""


def split_fragment(url: str) -> tuple[str, str]:
    """A URL without its fragment, and the fragment."""
    address, _, fragment = url.partition("#")
    return address, fragment


def absolute(base: str, href: str, schemes: frozenset[str]) -> str | None:
    """`href` resolved against `base`, or None when it cannot be a link: a bare fragment, another scheme, nonsense."""
    href = "".join(href.split()) if "\n" in href or "\t" in href or "\r" in href else href.strip()
    if not href or href.startswith("#") or len(href) > MAX_URL:
        return None
    try:
        url = _join(base, href)
        parts = urlsplit(url)
    except ValueError:
        return None
    if parts.scheme not in schemes or not parts.netloc or len(url) > MAX_URL:
        return None
    return url.replace(" ", "%20")


def shown_host(text: str) -> str:
    """A host or scheme for an error text: one line, short."""
    return one_line(text, 100)


def _join(base: str, href: str) -> str:
    """`urljoin`, also for a base of a scheme it does not know: it joins paths only for those it does."""
    scheme = base.partition(":")[0]
    if scheme in ("http", "https") or urlsplit(href).scheme:
        return urljoin(base, href)
    if href.startswith("//"):
        return "https:" + href
    return scheme + urljoin("http" + base[len(scheme) :], href)[len("http") :]


class LinkTable:
    """Link ids of one page being made, counted from 0 in document order.

    Args:
        page_url: Whose host decides whether a mark names the host.
    """

    def __init__(self, page_url: str) -> None:
        self._host = host_of(page_url)
        self._ids: dict[str, int] = {}

    def mark(self, url: str, text: str) -> str:
        """The mark for a link; a URL seen before keeps its id. `text` must not be empty."""
        number = self._ids.setdefault(url, len(self._ids))
        text = text.replace("†", "‡")
        host = host_of(url)
        return f"【{number}†{text}】" if host == self._host else f"【{number}†{text}†{host}】"

    @property
    def urls(self) -> tuple[str, ...]:
        """Absolute URLs by id."""
        return tuple(self._ids)


def mark_spans(line: str) -> list[tuple[int, int]]:
    """Half-open spans of a text line that belong to link marks and not to their text."""
    if "【" not in line:
        return []
    spans = []
    for match in _MARK.finditer(line):
        spans.append((match.start(), match.start(1)))
        spans.append((match.end(1), match.end()))
    return spans


def strip_marks(text: str) -> str:
    """Text with every link mark replaced by its link text."""
    return _MARK.sub(lambda match: match.group(1), text) if "【" in text else text
