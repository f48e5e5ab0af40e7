"""This project's own documentation as the corpus that is there before anybody adds a folder.

Above it: `service`. Below it: the corpus.
"""

from __future__ import annotations

from pathlib import Path

from toolhost.search.corpus import Corpus

NAME = "toolhost"
_PACKAGE = Path(__file__).parents[1]


def own_documents() -> dict[str, Path]:
    """What to index, by collection: the package's `docs`, in a checkout the folder and the file they come from."""
    packaged = _PACKAGE / "docs"
    if packaged.is_dir():
        return {NAME: packaged}
    checkout = _PACKAGE.parent
    found = {NAME: checkout / "docs", f"{NAME}-readme": checkout / "README.md"}
    return {name: path for name, path in found.items() if path.exists()}


def add_own_documents(corpus: Corpus) -> None:
    """Bring them up to date; nearly free when nothing changed. Raises CorpusError, sqlite3.Error."""
    known = {collection.name: collection.path for collection in corpus.collections()}
    for name, path in own_documents().items():
        at = known.get(name)
        if at is not None and at != path.resolve():
            if at.exists() and at.name != path.name:
                continue  # somebody's own folder of that name: theirs stays
            corpus.remove(name)  # of an installation that is gone, or that another one replaces
        corpus.add(path, name)
