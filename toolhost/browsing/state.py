"""The stack of pages of one session: pure data, to bytes and back, within caps.

Above it: `browser.Browser`, which pushes and reads. Below it: nothing but `Page`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from toolhost.browsing.errors import BrowserError
from toolhost.browsing.page import Page

MAX_PAGES = 200
MAX_BYTES = 32 * 1024 * 1024
# URL and title of evicted entries stay so that citations resolve; beyond this many even those go.
MAX_ENTRIES = 20_000
MAX_SEEN = 20_000
_VERSION = 1
_LENGTH = struct.Struct(">Q")


@dataclass
class Entry:
    """What a cursor stands for. `page` is None once its text was evicted."""

    url: str
    title: str
    page: Page | None
    cited_url: str


class BrowserState:
    """Page snapshots by cursor; cursors count from 0 and are never reused.

    Args:
        max_pages: Entries that keep their text.
        max_bytes: Bytes of text kept, each distinct page counted once.
    """

    def __init__(self, *, max_pages: int = MAX_PAGES, max_bytes: int = MAX_BYTES) -> None:
        self._max_pages = max_pages
        self._max_bytes = max_bytes
        self._entries: dict[int, Entry] = {}
        self._next = 0
        self._oldest_kept = 0
        self._uses: dict[int, int] = {}
        self._bytes = 0
        self._seen: dict[str, None] = {}

    def __len__(self) -> int:
        return self._next

    @property
    def size(self) -> int:
        """Bytes of page text kept now."""
        return self._bytes

    def push(self, page: Page) -> int:
        """Add a snapshot and return its cursor, evicting the oldest text if a cap is passed."""
        cursor = self._next
        self._next += 1
        cited = page.url if page.origin is None else self._cited_url(page.origin, page.url)
        self._entries[cursor] = Entry(page.url, page.title, page, cited)
        if not self._uses.get(id(page)):
            self._bytes += page.size
        self._uses[id(page)] = self._uses.get(id(page), 0) + 1
        self._note_seen(page)
        self._evict()
        return cursor

    def _cited_url(self, cursor: int, default: str) -> str:
        entry = self._entries.get(cursor)
        return entry.cited_url if entry is not None else default

    def _evict(self) -> None:
        while self._oldest_kept < self._next - 1 and (
            self._next - self._oldest_kept > self._max_pages or self._bytes > self._max_bytes
        ):
            self._forget_text(self._oldest_kept)
            self._oldest_kept += 1
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]

    def _forget_text(self, cursor: int) -> None:
        entry = self._entries[cursor]
        page, entry.page = entry.page, None
        if page is None:
            return
        self._uses[id(page)] -= 1
        if not self._uses[id(page)]:
            del self._uses[id(page)]
            self._bytes -= page.size

    def _note_seen(self, page: Page) -> None:
        for url in (page.url, *page.links):
            if url:
                self._seen[url.partition("#")[0]] = None
        while len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    def was_seen(self, url: str) -> bool:
        """Whether a page or a link of this session has this URL (fragments aside)."""
        return url.partition("#")[0] in self._seen

    def entry(self, cursor: int) -> Entry:
        """What `cursor` stands for; -1 is the newest. Its text may be gone.

        Raises:
            BrowserError: nothing was opened yet, or there is no such cursor.
        """
        if not self._next:
            raise BrowserError("No pages to access!")
        number = self._next - 1 if cursor == -1 else cursor
        found = self._entries.get(number)
        if found is None:
            raise BrowserError(
                f"Cursor `{cursor}` is out of range. Available cursor indices: "
                f"[{next(iter(self._entries))} - {self._next - 1}]."
            )
        return found

    def page(self, cursor: int = -1) -> Page:
        """The snapshot at `cursor`.

        Raises:
            BrowserError: as `entry`, or its text was evicted.
        """
        found = self.entry(cursor)
        if found.page is None:
            again = f" Open `{found.url}` again." if found.url else " Search again."
            raise BrowserError(f"The page of cursor `{cursor}` is no longer kept.{again}")
        return found.page

    def number(self, cursor: int) -> int:
        """`cursor` with -1 replaced by the newest cursor's number."""
        return self._next - 1 if cursor == -1 else cursor

    def latest(self, url: str) -> Page | None:
        """The newest snapshot of exactly this URL that still has its text."""
        for cursor in range(self._next - 1, self._oldest_kept - 1, -1):
            page = self._entries[cursor].page
            if page is not None and page.url == url and page.kind == "page":
                return page
        return None

    def entries(self) -> Iterator[tuple[int, Entry]]:
        """All known cursors, oldest first."""
        yield from self._entries.items()

    def to_bytes(self) -> bytes:
        """The whole state; a page shown many times is written once, and packed only the first time it is written."""
        pages: list[bytes] = []
        index: dict[int, int] = {}
        entries = []
        for cursor, entry in self._entries.items():
            number = None
            if entry.page is not None:
                if id(entry.page) not in index:
                    index[id(entry.page)] = len(pages)
                    pages.append(entry.page.packed)
                number = index[id(entry.page)]
            entries.append([cursor, entry.url, entry.title, number, entry.cited_url])
        values = {
            "version": _VERSION,
            "next": self._next,
            "oldest_kept": self._oldest_kept,
            "entries": entries,
            "seen": list(self._seen),
        }
        parts = [zlib.compress(json.dumps(values, ensure_ascii=False).encode(), level=1), *pages]
        return b"".join(_LENGTH.pack(len(part)) + part for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes, *, max_pages: int = MAX_PAGES, max_bytes: int = MAX_BYTES) -> BrowserState:
        """The state `to_bytes` wrote.

        Raises:
            ValueError: not such bytes, or of another version.
        """
        try:
            head, *packed = _parts(data)
            values = json.loads(zlib.decompress(head))
            if values["version"] != _VERSION:
                raise ValueError(f"browser state of version {values['version']!r}, not {_VERSION}")
            state = cls(max_pages=max_pages, max_bytes=max_bytes)
            pages = [Page.unpack(part) for part in packed]
            for cursor, url, title, number, cited in values["entries"]:
                page = None if number is None else pages[number]
                state._entries[cursor] = Entry(url, title, page, cited)
                if page is not None:
                    state._uses[id(page)] = state._uses.get(id(page), 0) + 1
            state._next, state._oldest_kept = values["next"], values["oldest_kept"]
            state._bytes = sum(page.size for page in pages)
            state._seen = dict.fromkeys(values["seen"])
        except (zlib.error, struct.error, KeyError, TypeError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"not a browser state: {error}") from error
        state._evict()
        return state


def _parts(data: bytes) -> list[bytes]:
    parts: list[bytes] = []
    position = 0
    while position < len(data) or not parts:
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if length > len(data) - position:
            raise ValueError("not a browser state: it is cut off")
        parts.append(data[position : position + length])
        position += length
    return parts
