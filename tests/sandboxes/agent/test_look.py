"""The look for changed files: a directory in which nothing can have changed is not listed, and nothing is missed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sandboxes.agent.look import Look


class Counted(Look):
    listed = 0

    def _list(  # type: ignore[override]
        self, directory: str, after: int, into: dict[str, tuple[int, int, int]]
    ) -> tuple[list[str], int, bool]:
        self.listed += 1
        return Look._list(directory, after, into)


@pytest.fixture
def look(tmp_path: Path) -> Counted:
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "file").write_text("x")
    return Counted(str(tmp_path))


def names(found: list[dict[str, object]]) -> list[str]:
    return [str(file["path"]).rpartition("/")[2] for file in found]


def later() -> int:
    """A time after which nothing has changed yet."""
    time.sleep(0.02)
    return time.time_ns() - 5_000_000


def test_a_directory_without_files_is_listed_once(look: Counted) -> None:
    for _ in range(5):
        assert look.since(later()) == []
    assert look.listed == 1


def test_a_file_that_is_made_later_is_found(look: Counted, tmp_path: Path) -> None:
    for number in range(3):
        after = later()
        look.since(after)
        (tmp_path / f"f{number}").write_text("x")
        assert names(look.since(after)) == [f"f{number}"]


def test_where_it_changed_in_this_very_execution_it_is_listed_again(look: Counted, tmp_path: Path) -> None:
    """What comes in the same tick as the look would leave the directory's date as it is."""
    (tmp_path / "gone").write_text("x")
    (tmp_path / "gone").unlink()
    after = os.stat(tmp_path).st_ctime_ns
    assert look.since(after) == []
    assert look.since(after) == []
    assert look.listed == 2


def test_what_is_in_it_can_change_without_it(look: Counted, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "file").write_text("x")
    after = later()
    assert look.since(after) == []
    (tmp_path / "file").write_text("more")
    (tmp_path / "below" / "deep").write_text("x")
    assert sorted(names(look.since(after))) == ["deep", "file"]
