"""The stack of pages of one session: pure data, to stored parts and back, within caps.

A page is a part of its own, and so is each entry of the stack: both never change once they are there, so a call stores
only what it has added.

Above it: `browser.Browser`, which pushes and reads. Below it: nothing but `Page`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from toolhost.browsing.errors import BrowserError
from toolhost.browsing.page import Page

MAX_PAGES = 200
MAX_BYTES = 32 * 1024 * 1024
# URL and title of evicted entries stay so that citations resolve; beyond this many even those go.
MAX_ENTRIES = 20_000
MAX_SEEN = 20_000
_VERSION = 2
# What the names of parts begin with; the cursor follows, of a page the one that it was first shown at.
_ENTRY, _PAGE = "e", "p"


@dataclass
class Entry:
    """What a cursor stands for. `page` is None once its text was evicted; `part` is the number of its part."""

    url: str
    title: str
    page: Page | None
    cited_url: str
    part: int


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
        self._uses: dict[int, int] = {}  # of a page, by its id()
        self._parts: dict[int, int] = {}  # of a page, by its id()
        self._bytes = 0
        self._seen: dict[str, None] = {}
        self._new_entries: dict[int, list[str]] = {}  # with the URLs that were first seen there
        self._gone_entries: list[int] = []
        self._changed_pages: dict[int, Page | None] = {}

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
        if id(page) not in self._parts:
            self._parts[id(page)] = cursor
            self._changed_pages[cursor] = page
        self._entries[cursor] = Entry(page.url, page.title, page, cited, self._parts[id(page)])
        self._use(page)
        self._new_entries[cursor] = self._note_seen([page.url, *page.links])
        self._evict()
        return cursor

    def _use(self, page: Page) -> None:
        if not self._uses.get(id(page)):
            self._bytes += page.size
        self._uses[id(page)] = self._uses.get(id(page), 0) + 1

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
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            self._new_entries.pop(oldest, None)
            self._gone_entries.append(oldest)

    def _forget_text(self, cursor: int) -> None:
        entry = self._entries[cursor]
        page, entry.page = entry.page, None
        if page is None:
            return
        self._uses[id(page)] -= 1
        if not self._uses[id(page)]:
            del self._uses[id(page)]
            self._bytes -= page.size
            self._parts.pop(id(page), None)
            self._changed_pages[entry.part] = None

    def _note_seen(self, urls: Iterable[str]) -> list[str]:
        """Returns those that are new."""
        new = []
        for url in urls:
            address = url.partition("#")[0]
            if address and address not in self._seen:
                self._seen[address] = None
                new.append(address)
        while len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return new

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

    def unsaved(self) -> dict[str, bytes | None]:
        """The parts that were not `saved` since they changed; None: it is to be removed. Of a new stack that is all.

        A call adds the part of an entry and, unless its page is there already, that of the page.
        """
        parts: dict[str, bytes | None] = {}
        for cursor in self._new_entries:
            parts[f"{_ENTRY}{cursor}"] = self._pack(cursor, self._entries[cursor])
        for number, page in self._changed_pages.items():
            parts[f"{_PAGE}{number}"] = None if page is None else page.packed
        for cursor in self._gone_entries:
            parts[f"{_ENTRY}{cursor}"] = None
        return parts

    def saved(self) -> None:
        """What is `unsaved` was stored."""
        self._new_entries.clear()
        self._changed_pages.clear()
        self._gone_entries.clear()

    def _pack(self, cursor: int, entry: Entry) -> bytes:
        values = {
            "version": _VERSION,
            "url": entry.url,
            "title": entry.title,
            "page": entry.part,
            "cited": entry.cited_url,
            "seen": self._new_entries[cursor],
        }
        return zlib.compress(json.dumps(values, ensure_ascii=False).encode(), level=1)

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, bytes], *, max_pages: int = MAX_PAGES, max_bytes: int = MAX_BYTES
    ) -> BrowserState:
        """The state whose parts these are. An entry whose page is not there has lost its text.

        Raises:
            ValueError: not such parts, or of another version.
        """
        state = cls(max_pages=max_pages, max_bytes=max_bytes)
        try:
            cursors = sorted(int(name[1:]) for name in parts if name[0] == _ENTRY)
            pages = {int(name[1:]): Page.unpack(part) for name, part in parts.items() if name[0] == _PAGE}
            if len(cursors) + len(pages) != len(parts):
                raise ValueError("it has parts of other kinds")
            for cursor in cursors:
                values = json.loads(zlib.decompress(parts[f"{_ENTRY}{cursor}"]))
                if values["version"] != _VERSION:
                    raise ValueError(f"it is of version {values['version']!r}, not {_VERSION}")
                part = values["page"]
                entry = Entry(values["url"], values["title"], pages.get(part), values["cited"], part)
                state._restore(cursor, entry, values["seen"])
        except (zlib.error, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"not a browser state that can be read: {error}") from error
        state._evict()
        return state

    def _restore(self, cursor: int, entry: Entry, seen: list[str]) -> None:
        self._entries[cursor] = entry
        self._next = cursor + 1
        if entry.page is None:
            self._oldest_kept = cursor + 1
        else:
            self._use(entry.page)
            self._parts[id(entry.page)] = entry.part
        self._note_seen(seen)
