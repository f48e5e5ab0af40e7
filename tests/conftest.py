"""What every test run shares: marks follow the machine, and what it could not run is named at the end.

With TOOLHOST_TEST_STRICT=1 (CI) nothing may be skipped: a skip is a failure.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Generator

import pytest

from tests.support.machine import MARKS

# A shell script that runs the tests with `&` has them ignore these, and every process that they start would ignore the
# signals that they send it.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

STRICT = os.environ.get("TOOLHOST_TEST_STRICT") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long_form = "torture" in (config.option.markexpr or "")
    kept, left = [], []
    for item in items:
        (kept if long_form or item.get_closest_marker("torture") is None else left).append(item)
    if left:  # not skipped: the long form is another command
        config.hook.pytest_deselected(items=left)
        items[:] = kept
    for item in items:
        for mark, reason_of in MARKS.items():
            if item.get_closest_marker(mark) and (reason := reason_of()):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, object, None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if STRICT and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and nothing may be skipped here: {report.longrepr[2]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    terminalreporter.section("what this machine could not run, and why")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} tests: {reason}")
