"""The table of docs/isolation.md has a row for each attack that is tested, and none for what is not."""

from __future__ import annotations

import re
from pathlib import Path

from sandboxes.testing.attack_suite import REFUSED, AttackSuite

PAGE = Path(__file__).parents[2] / "docs" / "isolation.md"


def test_each_row_is_from_a_test_and_each_test_has_a_row() -> None:
    rows = re.findall(r"\| `(test_\w+)` \|$", PAGE.read_text(), re.M)
    tests = {name for name in vars(AttackSuite) if name.startswith("test_")}
    assert sorted(rows) == sorted(tests)


def test_each_attempt_that_is_refused_is_named() -> None:
    listed = re.split(r"\s·\s", " ".join(PAGE.read_text().partition("What ends at once, with")[2].split()))
    names = {listed[0].partition(": ")[2], *listed[1:-1], listed[-1].partition(".")[0]}
    assert names == set(REFUSED)
