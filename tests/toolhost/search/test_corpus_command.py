"""`toolhost corpus` from its command line, in this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from toolhost.cli.corpus import app


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.md").write_text("# Pelicans\n\nA pelican is a bird.\n\n## Food\n\nFish, mostly.")
    (folder / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    return folder


def run(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--state-dir", str(tmp_path / "state")])


def test_add_list_search_and_remove(tmp_path: Path, docs: Path) -> None:
    added = run(tmp_path, "add", str(docs))
    assert added.exit_code == 0
    assert added.stdout == "docs: 1 indexed, 0 unchanged, 0 removed, 1 without text\n"
    assert "left out" in added.stderr and "bad.pdf" in added.stderr
    assert run(tmp_path, "add", str(docs)).stdout.startswith("docs: 0 indexed, 1 unchanged")
    assert run(tmp_path, "list").stdout == f"docs\t1\t{docs}\n"
    assert run(tmp_path, "search", "fish").stdout == (
        "Pelicans\n  corpus://docs/a.md (line 6)\n  ## Food Fish, mostly.\n"
    )
    assert "Nothing found." in run(tmp_path, "search", "zebra").stderr
    assert run(tmp_path, "remove", "docs").stdout == "docs: 1 documents forgotten\n"
    assert "Add a folder: toolhost corpus add PATH" in run(tmp_path, "list").stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", "/no/such/folder"), "there is no file or folder /no/such/folder"),
        (("remove", "absent"), "there is no collection 'absent'; there are: none"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_two(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    result = run(tmp_path, *arguments)
    assert (result.exit_code, result.stderr) == (2, f"toolhost: {reason}\n")


def test_a_named_pipe_in_the_folder_is_left_alone_and_one_named_itself_is_refused(tmp_path: Path, docs: Path) -> None:
    os.mkfifo(docs / "pipe.md")
    assert run(tmp_path, "add", str(docs)).stdout == "docs: 1 indexed, 0 unchanged, 0 removed, 1 without text\n"
    refused = run(tmp_path, "add", str(docs / "pipe.md"))
    assert (refused.exit_code, refused.stderr) == (2, f"toolhost: {docs}/pipe.md is neither a file nor a folder\n")


def test_a_file_whose_name_is_no_text_is_left_out_and_harms_no_other(tmp_path: Path, docs: Path) -> None:
    Path(os.fsdecode(os.fsencode(docs) + b"/caf\xe9.md")).write_text("not found")
    added = run(tmp_path, "add", str(docs))
    assert added.stdout == "docs: 1 indexed, 0 unchanged, 0 removed, 2 without text\n"
    assert added.stderr.count("its name is not UTF-8 text") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", "{docs}/no\udcff"), "the path is not UTF-8 text, so nothing could name its documents"),
        (("remove", "\udcff"), "the name cannot be used: not UTF-8 text"),
        (("search", "\udcff"), "the query cannot be used: not UTF-8 text"),
    ],
)
def test_arguments_that_are_no_text_are_refused(
    tmp_path: Path, docs: Path, arguments: tuple[str, ...], reason: str
) -> None:
    Path(os.fsdecode(os.fsencode(docs) + b"/no\xff")).mkdir()
    result = run(tmp_path, *(one.replace("{docs}", str(docs)) for one in arguments))
    assert (result.exit_code, result.stderr) == (2, f"toolhost: {reason}\n")
