"""Looking for a name in a tree that changes meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.trees import find_named


def test_a_directory_that_goes_while_it_is_looked_into_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in ("a/wanted", "going", "z/deep"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "z" / "deep" / "wanted").touch()
    scandir = os.scandir

    def late(place: Any) -> Any:
        if Path(place).name == "going":
            Path(place).rmdir()  # listed by now
        return scandir(place)

    monkeypatch.setattr(os, "scandir", late)
    assert sorted(find_named(tmp_path, "wanted")) == [tmp_path / "a/wanted", tmp_path / "z/deep/wanted"]
    assert not (tmp_path / "going").exists()
    assert find_named(tmp_path / "absent", "wanted") == []
