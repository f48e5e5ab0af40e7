"""The documentation that is the corpus at first."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolhost.browsing import own_documents
from toolhost.browsing.own_documents import NAME, add_own_documents
from toolhost.browsing.sections import FileConverter
from toolhost.search.corpus import Corpus


@pytest.fixture
def index(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path / "corpus.sqlite", FileConverter())


@pytest.fixture(autouse=True)
def closed(index: Corpus) -> object:
    yield
    index.close()


def paths(index: Corpus) -> dict[str, Path]:
    return {collection.name: collection.path for collection in index.collections()}


def test_the_checkouts_documentation_is_found_and_indexed_once(index: Corpus) -> None:
    add_own_documents(index)
    (hit,) = index.search("citation of an evicted page still resolves", 1)
    assert hit.url.startswith(f"corpus://{NAME}")
    assert f"{NAME}-readme" in paths(index)
    report = index.add(own_documents.own_documents()[NAME], NAME)
    assert (report.added, report.removed) == (0, 0)
    assert report.unchanged > 0


def test_the_documentation_of_an_installation_that_is_gone_or_replaced_goes(index: Corpus, tmp_path: Path) -> None:
    other = tmp_path / "other" / "docs"
    other.mkdir(parents=True)
    (other / "old.md").write_text("# Old\n\nzebra\n")
    index.add(other, NAME)
    add_own_documents(index)
    assert paths(index)[NAME] == own_documents.own_documents()[NAME].resolve()
    assert index.search("zebra", 1) == []


def test_somebodys_own_folder_of_that_name_stays(index: Corpus, tmp_path: Path) -> None:
    theirs = tmp_path / "toolhost"
    theirs.mkdir()
    (theirs / "notes.md").write_text("# Notes\n\nzebra\n")
    index.add(theirs)
    add_own_documents(index)
    assert paths(index)[NAME] == theirs.resolve()
    assert [hit.url for hit in index.search("zebra", 1)] == ["corpus://toolhost/notes.md"]
