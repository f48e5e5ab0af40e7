"""The local corpus: a full text index over folders, in one SQLite file. It needs no key and no network.

One row a heading section, so that a hit carries the line of its passage. How a file becomes text is the caller's
(`Converter`): this module knows nothing of HTML or PDF.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from toolhost.search.base import Document, Failure, Filters, Hit, SearchError
from toolhost.search.terms import any_query, every_query, index_text, snippet

_T = TypeVar("_T")

SCHEME = "corpus"
SUFFIXES = frozenset({".html", ".htm", ".xhtml", ".md", ".markdown", ".txt", ".rst", ".pdf"})
MAX_FILE = 50 * 1024 * 1024
_COMMIT_EVERY = 100
_CANDIDATES = 200
_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS collections (name TEXT PRIMARY KEY, path TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    id INTEGER PRIMARY KEY, collection TEXT NOT NULL, path TEXT NOT NULL, url TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL, modified INTEGER NOT NULL, size INTEGER NOT NULL, content BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS documents_by_collection ON documents (collection, path);
CREATE TABLE IF NOT EXISTS sections (
    id INTEGER PRIMARY KEY, document INTEGER NOT NULL, line INTEGER NOT NULL, text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS sections_by_document ON sections (document);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (
    title, heading, body, tokenize = 'porter unicode61 remove_diacritics 2');
"""


@dataclass(frozen=True)
class Section:
    """A passage of a document.

    Attributes:
        line: Display line it begins at.
        heading: Its heading, or empty.
        text: Its text, without marks of the browser.
    """

    line: int
    heading: str
    text: str


@dataclass(frozen=True)
class Converted:
    """A file as the browser would show it, and its sections."""

    document: Document
    sections: tuple[Section, ...]


Converter = Callable[[Path, str], Converted]
"""From a file and the URL it gets to text. Raises Unreadable for a file without text."""
Progress = Callable[[int, int, Path], None]
"""Called after each file with how many are done, how many there are, and which it was."""


class Unreadable(Exception):
    """A file has no text to index; `str(error)` is why."""


class CorpusError(Exception):
    """A request the corpus cannot fulfil; the text says what to do."""


@dataclass(frozen=True)
class Collection:
    """One indexed folder."""

    name: str
    path: Path
    documents: int


@dataclass
class AddReport:
    """What adding a folder did. `skipped` has each file left out, and why."""

    name: str
    added: int = 0
    unchanged: int = 0
    removed: int = 0
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def _make_private(path: Path) -> None:
    """The file, for its owner alone: it holds the texts of whole folders. What SQLite puts beside it has its mode."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # SQLite says why
    with os.fdopen(descriptor, "rb") as file, contextlib.suppress(OSError):  # another's, and shared on purpose
        os.fchmod(file.fileno(), 0o600)


class Corpus:
    """The index. Methods block; one object may be used by several threads.

    Args:
        path: The SQLite file; made with its folder when missing.
        convert: Turns a file into text.

    Raises:
        CorpusError: the file cannot be opened or is no index.
        OSError: its folder cannot be made.
    """

    def __init__(self, path: Path, convert: Converter) -> None:
        self._convert = convert
        self._lock = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_private(path)
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=30)
        except sqlite3.Error as error:
            raise CorpusError(f"the index {path} cannot be opened: {error}") from error
        try:
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise CorpusError(f"{path} was made by another version; delete it and add the folders again")
            # Readers of a running host must not wait for a folder being added by the command line.
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                raise CorpusError(f"the index {path} cannot be used: {error}") from error
            raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def add(self, path: Path, name: str | None = None, progress: Progress | None = None) -> AddReport:
        """Index a folder or a file, or bring its index up to date: changed files anew, vanished ones out.

        Args:
            name: Of the collection; the folder's own name when None.

        Raises:
            CorpusError: there is no such path, or the name belongs to another.
        """
        path = path.expanduser().resolve()
        if not path.exists():
            raise CorpusError(f"there is no file or folder {path}")
        if not path.is_file() and not path.is_dir():
            raise CorpusError(f"{path} is neither a file nor a folder")
        if not _is_text(str(path)):
            raise CorpusError("the path is not UTF-8 text, so nothing could name its documents")
        name = _collection_name(name or path.name)
        with self._lock:
            self._claim(name, path)
        report = AddReport(name)
        files = list(_files(path))
        root = path if path.is_dir() else path.parent
        known = self._known(name)
        for number, file in enumerate(files, 1):
            relative = file.relative_to(root).as_posix()
            self._add_file(report, file, relative, known.pop(relative, None))
            if number % _COMMIT_EVERY == 0:
                self._commit()
            if progress is not None:
                progress(number, len(files), file)
        with self._lock:
            for document, _, _ in known.values():
                self._delete(document)
        report.removed = len(known)
        self._commit()
        return report

    def _claim(self, name: str, path: Path) -> None:
        row = self._db.execute("SELECT path FROM collections WHERE name = ?", (name,)).fetchone()
        if row is not None and row[0] != str(path):
            raise CorpusError(f"the name {name!r} belongs to {row[0]}; give another name, or remove that one first")
        self._db.execute("INSERT OR IGNORE INTO collections VALUES (?, ?)", (name, str(path)))

    def _known(self, name: str) -> dict[str, tuple[int, int, int]]:
        with self._lock:
            rows = self._db.execute(
                "SELECT path, id, modified, size FROM documents WHERE collection = ?", (name,)
            ).fetchall()
        return {path: (document, modified, size) for path, document, modified, size in rows}

    def _add_file(self, report: AddReport, file: Path, relative: str, known: tuple[int, int, int] | None) -> None:
        try:
            status = file.stat()
            if not _is_text(relative):
                raise Unreadable("its name is not UTF-8 text")
            if known is not None and known[1:] == (status.st_mtime_ns, status.st_size):
                report.unchanged += 1
                return
            if status.st_size > MAX_FILE:
                raise Unreadable(f"it is larger than {MAX_FILE} bytes")
            converted = self._convert(file, f"{SCHEME}://{report.name}/{quote(relative)}")
        except (Unreadable, OSError) as error:
            report.skipped.append((file, str(error)))
            if known is not None:
                with self._lock:
                    self._delete(known[0])
            return
        with self._lock:
            if known is not None:
                self._delete(known[0])
            self._insert(report.name, relative, status, converted)
        report.added += 1

    def _insert(self, name: str, relative: str, status: os.stat_result, converted: Converted) -> None:
        document = converted.document
        content = {"text": document.text, "links": document.links, "anchors": dict(document.anchors)}
        blob = zlib.compress(json.dumps(content, ensure_ascii=False).encode(), level=1)
        row = self._db.execute(
            "INSERT INTO documents (collection, path, url, title, modified, size, content)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (name, relative, document.url, document.title, status.st_mtime_ns, status.st_size, blob),
        ).lastrowid
        title = index_text(document.title)
        for section in converted.sections:
            number = self._db.execute(
                "INSERT INTO sections (document, line, text) VALUES (?, ?, ?)", (row, section.line, section.text)
            ).lastrowid
            self._db.execute(
                "INSERT INTO words (rowid, title, heading, body) VALUES (?, ?, ?, ?)",
                (number, title, index_text(section.heading), index_text(section.text)),
            )

    def _delete(self, document: int) -> None:
        self._db.execute("DELETE FROM words WHERE rowid IN (SELECT id FROM sections WHERE document = ?)", (document,))
        self._db.execute("DELETE FROM sections WHERE document = ?", (document,))
        self._db.execute("DELETE FROM documents WHERE id = ?", (document,))

    def _commit(self) -> None:
        with self._lock:
            self._db.commit()

    def collections(self) -> list[Collection]:
        """What is indexed, by name."""
        with self._lock:
            rows = self._db.execute(
                "SELECT name, path, (SELECT count(*) FROM documents WHERE collection = name)"
                " FROM collections ORDER BY name"
            ).fetchall()
        return [Collection(name, Path(path), documents) for name, path, documents in rows]

    def remove(self, name: str) -> int:
        """Forget a collection; returns how many documents it had. Raises CorpusError when there is none such."""
        with self._lock:
            if not self._db.execute("DELETE FROM collections WHERE name = ?", (name,)).rowcount:
                known = ", ".join(collection.name for collection in self.collections()) or "none"
                raise CorpusError(f"there is no collection {name!r}; there are: {known}")
            documents = [row[0] for row in self._db.execute("SELECT id FROM documents WHERE collection = ?", (name,))]
            for document in documents:
                self._delete(document)
            self._db.commit()
        return len(documents)

    def search(self, query: str, n: int) -> list[Hit]:
        """At most `n` hits, one a document, best first: those with every word, then those with any."""
        found: dict[int, tuple[int, int]] = {}
        with self._lock:
            for expression in (every_query(query), any_query(query)):
                if expression and len(found) < n:
                    for section, document, line in self._matches(expression):
                        found.setdefault(document, (section, line))
            return [self._hit(document, *found[document], query) for document in list(found)[:n]]

    def _matches(self, expression: str) -> list[tuple[int, int, int]]:
        return self._db.execute(
            "SELECT sections.id, sections.document, sections.line FROM"
            " (SELECT rowid AS number, bm25(words, 4.0, 3.0, 1.0) AS score FROM words WHERE words MATCH ?"
            " ORDER BY score LIMIT ?) JOIN sections ON sections.id = number ORDER BY score",
            (expression, _CANDIDATES),
        ).fetchall()

    def _hit(self, document: int, section: int, line: int, query: str) -> Hit:
        url, title = self._db.execute("SELECT url, title FROM documents WHERE id = ?", (document,)).fetchone()
        text = self._db.execute("SELECT text FROM sections WHERE id = ?", (section,)).fetchone()[0]
        return Hit(title=title, url=url, snippet=snippet(text, query), line=line)

    def document(self, url: str) -> Document | None:
        """The document with this URL, as it was indexed."""
        with self._lock:
            row = self._db.execute("SELECT url, title, content FROM documents WHERE url = ?", (url,)).fetchone()
        if row is None:
            return None
        content = json.loads(zlib.decompress(row[2]))
        return Document(row[0], row[1], content["text"], tuple(content["links"]), content["anchors"])


class CorpusSearch:
    """The corpus as a search provider.

    Args:
        corpus: Open for as long as the provider is; closed with it.
    """

    name = "corpus"

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    async def search(self, query: str, n: int, filters: Filters) -> list[Hit]:
        """See `SearchProvider.search`."""
        return await self._run(lambda: self._corpus.search(query, n))

    async def fetch(self, url: str) -> Document | None:
        """See `SearchProvider.fetch`; only `corpus://` URLs are its own."""
        if not url.startswith(f"{SCHEME}://"):
            return None
        return await self._run(lambda: self._corpus.document(url))

    async def _run(self, operation: Callable[[], _T]) -> _T:
        try:
            return await asyncio.to_thread(operation)
        except sqlite3.Error as error:
            raise SearchError(Failure.ANSWER, f"the corpus cannot be read: {error}") from error

    async def aclose(self) -> None:
        """Close the index."""
        await asyncio.to_thread(self._corpus.close)


def _is_text(name: str) -> bool:
    """Whether a name of the file system can be written down; any bytes can be one."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _collection_name(text: str) -> str:
    name = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in text.lower())
    name = name.strip("-.")
    if not name:
        raise CorpusError(f"{text!r} makes no name for a collection; give one of letters, digits, - and _")
    return name


def _files(path: Path) -> Iterator[Path]:
    """Files that can be indexed, in a stable order; hidden ones and links out of the folder are left out.

    Regular files only: to open a named pipe waits for its writer, which may never come.
    """
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if name.startswith(".") or file.suffix.lower() not in SUFFIXES:
                continue
            if file.resolve().is_relative_to(path) and file.is_file():
                yield file
