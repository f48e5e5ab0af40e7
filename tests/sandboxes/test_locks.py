"""A lock that another holds is told apart from one that cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandboxes import locks

HERE = [Path("/proc/lock"), Path("/proc/self/lock")]  # no file can be made there: ENOENT, not EACCES


def test_one_has_it_at_a_time(tmp_path: Path) -> None:
    lock = locks.take(tmp_path / "lock", 0o600)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    with pytest.raises(locks.Held):
        locks.take(tmp_path / "lock")
    with pytest.raises(locks.Held):  # nor has asking for it given it away
        locks.take(tmp_path / "lock")
    lock.release()
    locks.take(tmp_path / "lock").release()


@pytest.mark.parametrize("path", HERE, ids=str)
def test_where_no_file_can_be_nobody_has_it(path: Path) -> None:
    if not os.path.ismount("/proc"):
        pytest.skip("no /proc")
    with pytest.raises(OSError, match="No such file"):
        locks.take(path)


def test_a_directory_in_its_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        locks.take(tmp_path)
