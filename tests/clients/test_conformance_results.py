"""The names of the suite's result directories, at the times of day that look like a part of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conformance_results import failures, scenario

NAMES = ["ping", "server-initialize", "json-schema-2020-12", "elicitation-sep1034-defaults", "a-20"]
TIMES = [
    "2026-11-30T10-32-54-204Z",  # each number of it may begin as a year does
    "2026-11-20T20-20-20-200Z",
    "2026-11-30T10-32-54-000Z",
    "2026-11-30T10-20-54-999Z",
    "2026-11-30T10-32-54Z",
    "2026-11-30T10-32-54",
]


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", NAMES)
def test_a_result_directory_names_its_scenario_at_any_time(name: str, time: str) -> None:
    assert scenario(f"server-{name}-{time}") == name


@pytest.mark.parametrize(
    "name", ["", "ping", "server-ping", "server-2026-11-30T10-32-54-204Z", "server-ping-2026-11-30"]
)
def test_another_directory_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"suite: {name}$"):
        scenario(name)


def test_what_failed_in_any_run_of_a_scenario_counts(tmp_path: Path) -> None:
    for time, status in (("2026-11-30T10-32-54-204Z", "FAILURE"), ("2026-11-30T10-32-55-000Z", "SUCCESS")):
        directory = tmp_path / f"server-ping-{time}"
        directory.mkdir()
        checks = [{"status": status, "errorMessage": "no answer"}, {"status": "INFO"}]
        (directory / "checks.json").write_text(json.dumps(checks))
    assert failures(tmp_path) == {"ping": ["no answer"]}
