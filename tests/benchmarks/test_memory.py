"""A machine that does other work says nothing about a session's memory, and the benchmark must not print that."""

from __future__ import annotations

import pytest

from benchmarks.cases.memory import Use, of_each

MIB = 1 << 20


def test_what_the_machine_gave_is_divided_by_the_sessions() -> None:
    found = of_each(Use(1000 * MIB, 80 * MIB, 500 * MIB), Use(1185 * MIB, 104 * MIB, 501 * MIB), 20)
    assert found.values == [8 * MIB]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Use(1000 * MIB, 80 * MIB, 500 * MIB), Use(1420 * MIB, 80 * MIB, 760 * MIB)),  # another started
        (Use(1000 * MIB, 80 * MIB, 500 * MIB), Use(1040 * MIB, 80 * MIB, 380 * MIB)),  # another ended
        (Use(1000 * MIB, 80 * MIB, 500 * MIB), Use(900 * MIB, 80 * MIB, 500 * MIB)),  # there is less than before
    ],
)
def test_beside_other_work_it_is_left_out(before: Use, after: Use) -> None:
    found = of_each(before, after, 20)
    assert not found.values
    assert "other processes" in found.error
